"""JAX's coordination service, and clients of it, in the process of a test."""

import contextlib
import socket


@contextlib.contextmanager
def coordination_service(num_clients, **options):
    """Starts JAX's coordination service, and yields its address."""
    from jax._src.lib import _jax

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, num_clients, **options)
    yield address
    service.shutdown()


def connect(address, index=0, **options):
    """Returns a client of the service."""
    from jax._src.lib import _jax

    client = _jax.get_distributed_runtime_client(
        address, index, init_timeout=60, shutdown_on_destruction=False, **options
    )
    client.connect()
    return client
