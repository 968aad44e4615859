"""The suite on a real HDFS."""

from __future__ import annotations

import uuid

import pytest
from hadoop import HdfsCluster

from swift_ft.testing import LogStoreTests


class TestHdfsStore(LogStoreTests):
    @pytest.fixture
    def url(self, hdfs: HdfsCluster) -> str:
        return f"{hdfs.url}/{uuid.uuid4().hex}"
