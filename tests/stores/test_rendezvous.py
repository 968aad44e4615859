"""The embedded rendezvous store and etcd do the same for a job."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from benchmarks.lib.etcd import EtcdCluster
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.block_log import BlockLog, block_log_in
from swift_ft.coordination.store_client import connect as connect_to
from swift_ft.testing.block_log_conformance import BlockLogConformanceTests
from swift_ft.testing.rendezvous_conformance import Connect, RendezvousConformanceTests
from tests.support.store_processes import store_process


class TestEmbedded(RendezvousConformanceTests):
    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        with store_process() as service:
            yield partial(connect_to, service.address)


class TestEtcd(RendezvousConformanceTests):
    @pytest.fixture
    def connect(self, etcd: EtcdCluster) -> Connect:
        return partial(connect_to, StoreAddress.etcd(etcd.endpoints))


class TestBlocksInTheEmbeddedStore(BlockLogConformanceTests):
    @pytest.fixture
    def open_log(self) -> Iterator[Callable[[], BlockLog]]:
        with store_process() as service:
            yield lambda: block_log_in(connect_to(service.address, "run"))


class TestBlocksInEtcd(BlockLogConformanceTests):
    @pytest.fixture
    def open_log(self, etcd: EtcdCluster) -> Callable[[], BlockLog]:
        run = f"run-{uuid.uuid4().hex}"
        return lambda: block_log_in(connect_to(StoreAddress.etcd(etcd.endpoints), run))
