"""One cluster of several resolvers."""

from typing import ClassVar

from jdist._src.cluster.resolver import ClusterResolver
from jdist._src.cluster.simple import SimpleClusterResolver
from jdist._src.core.tree import one_line


class UnionResolver(SimpleClusterResolver):
    """The jobs of several resolvers in one cluster, such as workers of Kubernetes and parameter servers of `TF_CONFIG`.

    A job that several resolvers have is concatenated, if its task indices are 0, 1, 2, ... in each of them. Otherwise the tasks
    keep their indices, which must differ.

    Args:
        *resolvers: The resolvers. This process is the task of the first, unless `task_type` and `task_id` are passed.
        task_type: The job of this process in the union.
        task_id: The index of this process in its job in the union.

    Raises:
        TypeError: An argument is not a `ClusterResolver`.
        ValueError: No resolver is passed, two tasks have the same index, or a resolver does not contain the addresses of its
            processes.

    Example:
        >>> servers = SimpleClusterResolver({"ps": ["10.0.0.9:8476"]})
        >>> workers = SimpleClusterResolver(
        ...     {"worker": ["10.0.0.1:8476", "10.0.0.2:8476"]}, task_type="worker", task_id=1
        ... )
        >>> union = UnionResolver(workers, servers)
        >>> union.num_processes, union.process_id, union.cluster_spec()["ps"]
        (2, 1, {0: '10.0.0.9:8476'})
    """

    _source: ClassVar[str] = "the union"

    def __init__(self, *resolvers: ClusterResolver, task_type: str | None = None, task_id: int | None = None):
        for position, resolver in enumerate(resolvers):
            # `SimpleClusterResolver` first: in Python 3.11 the check of a protocol reads `task_type`, which may be unknown
            # (https://github.com/python/cpython/issues/102433).
            if not isinstance(resolver, (SimpleClusterResolver, ClusterResolver)):
                raise TypeError(
                    f"Argument {position} of `UnionResolver` must be a `ClusterResolver`, got {one_line(resolver)}."
                )
        if not resolvers:
            raise ValueError("`UnionResolver` needs at least one resolver, got none.")
        specs = [resolver.cluster_spec() for resolver in resolvers]
        for position, (resolver, spec) in enumerate(zip(resolvers, specs, strict=True)):
            _check_addresses(position, resolver, spec)
        first = resolvers[0]
        if task_type is None and task_id is None and _has_task(first):
            task_type, task_id = first.task_type, first.task_id
        super().__init__(
            {job: _merge(job, [spec[job] for spec in specs if job in spec]) for spec in specs for job in spec},
            task_type=task_type,
            task_id=task_id,
            environment=first.environment,
            num_accelerators=_accelerators(first),
            local_device_ids=getattr(first, "local_device_ids", None),
        )


def _check_addresses(position: int, resolver: ClusterResolver, spec: dict[str, dict[int, str]]) -> None:
    count = sum(len(spec.get(job, {})) for job in ("chief", "worker"))
    if count != resolver.num_processes and not (_has_task(resolver) and resolver.task_type == "evaluator"):
        raise ValueError(
            f"Argument {position} of `UnionResolver` contains the addresses of {count} of its {resolver.num_processes} "
            "processes. Use it without a union, or pass a `SimpleClusterResolver` with all addresses."
        )


def _has_task(resolver: ClusterResolver) -> bool:
    return not isinstance(resolver, SimpleClusterResolver) or resolver.has_task


def _merge(job: str, parts: list[dict[int, str]]) -> dict[int, str]:
    if all(sorted(part) == list(range(len(part))) for part in parts):
        return dict(enumerate(part[index] for part in parts for index in range(len(part))))
    merged: dict[int, str] = {}
    for part in parts:
        if duplicates := sorted(merged.keys() & part.keys()):
            raise ValueError(
                f"Duplicate task indices {duplicates} of job {job!r} in the resolvers of the union. Use different indices, or "
                "lists of addresses, which are concatenated."
            )
        merged |= part
    return dict(sorted(merged.items()))


def _accelerators(resolver: ClusterResolver) -> dict[str, int] | None:
    try:
        return dict(resolver.num_accelerators())
    except RuntimeError:  # unknown
        return None
