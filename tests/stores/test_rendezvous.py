"""The embedded rendezvous store and etcd do the same for a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from benchmarks.lib.etcd import EtcdCluster
from swift_ft.coordination.store_client import connect as connect_to
from swift_ft.launch.store_service import StoreService
from swift_ft.store_address import ETCD, StoreAddress
from swift_ft.testing.rendezvous_conformance import Connect, RendezvousConformanceTests


class TestEmbedded(RendezvousConformanceTests):
    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        with closing(StoreService("127.0.0.1", 0)) as service:
            yield partial(connect_to, service.address)


class TestEtcd(RendezvousConformanceTests):
    @pytest.fixture
    def connect(self, etcd: EtcdCluster) -> Connect:
        return partial(connect_to, StoreAddress(tuple(etcd.endpoints.split(",")), ETCD))
