"""A local Ray that the tests share, and clusters of several pretended nodes.

A process is a driver of one cluster at a time: `ray_cluster` ends the shared one, and the next test that wants it
starts it again.
"""

import logging
import time

import pytest
import ray
from ray.cluster_utils import Cluster

STORE = {"object_store_memory": 200 * 1024**2}  # bytes; several clusters may run on one machine
QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}


@pytest.fixture(scope="session", autouse=True)
def _end_of_ray():
    yield
    ray.shutdown()


@pytest.fixture
def local_ray():
    """One local Ray with 4 CPUs, kept from test to test."""
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=4, include_dashboard=False, **STORE, **QUIET)


@pytest.fixture
def nothing_left(local_ray):
    """Fails a test after which devices stay taken."""
    yield
    deadline = time.monotonic() + 15
    while ray.available_resources().get("CPU", 0) < 4:
        assert time.monotonic() < deadline, f"still taken: {ray.available_resources()}"
        time.sleep(0.1)


@pytest.fixture
def ray_cluster():
    """A function that starts a cluster of the given nodes, such as [{"num_cpus": 1, "num_gpus": 2}], and joins it."""
    ray.shutdown()
    clusters = []

    def start(nodes):
        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **STORE, **nodes[0]})
        clusters.append(cluster)
        for node in nodes[1:]:
            cluster.add_node(**STORE, **node)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, **QUIET)
        return cluster

    yield start
    ray.shutdown()
    for cluster in clusters:
        cluster.shutdown()
