"""A resolver from a cluster spec: the addresses of the tasks of each job. The other resolvers read a spec from their source."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from jdist._src.cluster.joining import join_processes
from jdist._src.cluster.settings import check_coordinator
from jdist._src.core.tree import one_line

Addresses = Sequence[str | None] | Mapping[int, str | None] | Mapping[str, str]
# The jobs in the order of their process indices, then the jobs whose tasks are not processes of the cluster.
JOBS = ("chief", "worker", "evaluator", "ps")
_MEMBERS = JOBS[:2]


class _Task(NamedTuple):
    job: str
    task_id: int
    address: str | None


@dataclasses.dataclass(frozen=True, init=False)
class SimpleClusterResolver:
    """The processes of a cluster spec. All settings are read once, in the constructor.

    The chief is process 0, and the workers follow in the order of their task indices. Without a chief, the first worker is
    process 0. An evaluator is a separate cluster of one process. Parameter servers do not have a process index.

    Args:
        cluster_spec: The addresses of the tasks of each job: `"chief"`, `"worker"`, `"evaluator"`, `"ps"`. A list, or a mapping
            from the task index to the address. An unknown address is None.
        task_type: The job of this process.
        task_id: The index of this process in its job. Both may be omitted if there is one task, or in a resolver that is an
            argument of `UnionResolver`.
        environment: The source of the settings.
        num_accelerators: The number of accelerators of each kind per process, such as `{"GPU": 4}`.
        coordinator_address: The `"host:port"` where process 0 listens. Default: the address of process 0.
        local_device_ids: The GPUs of this process among the visible GPUs of its host; default: all of them.

    Attributes:
        coordinator_address: The `"host:port"` where process 0 listens, the same on every process. Empty if the only process has
            no address.
        environment: The source of the settings.
        local_device_ids: The GPUs of this process among the visible GPUs of its host, or None for all of them.

    Raises:
        TypeError: `cluster_spec` is not a mapping from jobs to lists or mappings of addresses.
        ValueError: The jobs, the addresses and the task do not describe a cluster with this process.

    Example:
        >>> resolver = SimpleClusterResolver(
        ...     {"chief": ["10.0.0.1:8476"], "worker": ["10.0.0.2:8476", "10.0.0.3:8476"]},
        ...     task_type="worker",
        ...     task_id=1,
        ... )
        >>> resolver.master(), resolver.num_processes, resolver.process_id, resolver.is_chief
        ('10.0.0.1:8476', 3, 2, False)
        >>> resolver.initialize()  # doctest: +SKIP
    """

    coordinator_address: str
    environment: str
    local_device_ids: tuple[int, ...] | None
    _task: tuple[str, int] | None
    _tasks: tuple[_Task, ...] = dataclasses.field(repr=False)
    _accelerators: tuple[tuple[str, int], ...] | None = dataclasses.field(repr=False)

    _source: ClassVar[str] = "`cluster_spec`"  # for messages
    _task_advice: ClassVar[str] = "Pass `task_type` and `task_id`."
    _no_accelerators: ClassVar[str] = ""  # the reason why the number of accelerators is unknown

    def __init__(
        self,
        cluster_spec: Mapping[str, Addresses],
        *,
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        coordinator_address: str | None = None,
        local_device_ids: Sequence[int] | None = None,
    ):
        tasks = _tasks(cluster_spec, self._source)
        task = _select_task(tasks, task_type, task_id, self._source)
        # The dataclass is frozen, so the fields are set through `vars`.
        vars(self).update(
            coordinator_address=_coordinator(coordinator_address, tasks, task, self._source),
            environment=environment,
            local_device_ids=None if local_device_ids is None else tuple(local_device_ids),
            _task=task,
            _tasks=tasks,
            _accelerators=None if num_accelerators is None else tuple(num_accelerators.items()),
        )

    @property
    def num_processes(self) -> int:
        """The number of processes: the chief and the workers, or 1 for an evaluator."""
        if self._task is not None and self._task[0] == "evaluator":
            return 1
        return len(_members(self._tasks))

    @property
    def process_id(self) -> int:
        """The index of this process, from 0, equal to the later `jax.process_index()`.

        Raises:
            ValueError: This process is a parameter server, or its task is unknown.
        """
        if self.task_type == "ps":
            raise ValueError(
                "There is no process index for task type 'ps': parameter servers are not processes of the cluster. Start the "
                f"strategy on the chief and the workers; this is ps {self.task_id}."
            )
        if self.task_type == "evaluator":
            return 0
        return [(task.job, task.task_id) for task in _members(self._tasks)].index((self.task_type, self.task_id))

    @property
    def task_type(self) -> str:
        """The job of this process: `"chief"`, `"worker"`, `"evaluator"` or `"ps"`."""
        return self._own_task()[0]

    @property
    def task_id(self) -> int:
        """The index of this process in its job."""
        return self._own_task()[1]

    @property
    def has_task(self) -> bool:
        """Whether the task of this process is known."""
        return self._task is not None

    @property
    def is_chief(self) -> bool:
        """Whether this process is process 0 of its cluster: the chief, the first worker without a chief, or the evaluator."""
        return self.task_type != "ps" and self.process_id == 0

    def cluster_spec(self) -> dict[str, dict[int, str]]:
        """Returns the known addresses of each job, by task index."""
        spec: dict[str, dict[int, str]] = {}
        for task in self._tasks:
            addresses = spec.setdefault(task.job, {})
            if task.address is not None:
                addresses[task.task_id] = task.address
        return spec

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Returns the address of the coordinator, or of a task.

        Args:
            task_type: The job of the task; default: the coordinator.
            task_id: The index of the task in its job; default: 0.

        Raises:
            ValueError: There is no such task, or its address is unknown.
        """
        if task_type is None and task_id is None:
            return self.coordinator_address
        addresses = self.cluster_spec().get(task_type or "", {})
        index = 0 if task_id is None else task_id
        if index not in addresses:
            known = {job: sorted(known) for job, known in self.cluster_spec().items()}
            raise ValueError(f"No address of task {index} of job {task_type!r}: {self._source} has the tasks {known}.")
        return addresses[index]

    def num_accelerators(self) -> dict[str, int]:
        """Returns the number of accelerators of each kind per process.

        Raises:
            RuntimeError: The number is unknown.
        """
        if self._accelerators is None:
            raise RuntimeError(
                f"The number of accelerators per process is unknown: "
                f"{self._no_accelerators or f'{self._source} does not contain it'}. After `initialize()`, use "
                "`jax.local_device_count()`."
            )
        return dict(self._accelerators)

    def initialize(self, *, timeout_seconds: float = 300.0) -> None:
        """Joins the other processes by `jax.distributed.initialize`, unless it has been called. Call it before JAX is used.

        Args:
            timeout_seconds: The time in which all processes must join.

        Raises:
            ValueError: This process is a parameter server, or its task is unknown.
            RuntimeError: A JAX backend has started already, or the other processes cannot be reached.
        """
        join_processes(
            self.coordinator_address,
            self.num_processes,
            self.process_id,
            local_device_ids=self.local_device_ids,
            timeout_seconds=timeout_seconds,
        )

    def _own_task(self) -> tuple[str, int]:
        if self._task is None:
            raise ValueError(
                f"The task of this process is unknown: {self._source} has {_counts(self._tasks)}. {self._task_advice}"
            )
        return self._task


def _tasks(cluster_spec: Any, source: str) -> tuple[_Task, ...]:
    """Returns all tasks, in the order of `JOBS` and of their indices."""
    example = "such as {'worker': ['10.0.0.1:8476', '10.0.0.2:8476']}"
    if not isinstance(cluster_spec, Mapping):
        raise TypeError(
            f"{source} must be a mapping from jobs to addresses, {example}, got {type(cluster_spec).__name__} "
            f"{one_line(cluster_spec)}."
        )
    if not cluster_spec:
        raise ValueError(f"{source} has no jobs. Pass the addresses of the processes, {example}.")
    if unknown := [job for job in cluster_spec if job not in JOBS]:
        raise ValueError(
            f"Unrecognized job {unknown[0]!r} in {source}: the jobs are {', '.join(JOBS)}. Rename the job."
        )
    tasks: list[_Task] = []
    for job in sorted(cluster_spec, key=JOBS.index):
        addresses = _addresses(job, cluster_spec[job], source)
        if job in ("chief", "evaluator") and len(addresses) > 1:
            raise ValueError(
                f"There must be at most one {job!r} task, but {source} has {len(addresses)}: {addresses}. Make the others "
                "workers."
            )
        tasks += [_Task(job, index, addresses[index]) for index in sorted(addresses)]
    if not tasks:
        jobs = " and ".join(map(repr, cluster_spec))
        raise ValueError(f"{source} has no addresses for {jobs}. Pass the addresses of the processes, {example}.")
    _check_different_addresses(tasks, source)
    return tuple(tasks)


def _addresses(job: str, addresses: Any, source: str) -> dict[int, str | None]:
    if not isinstance(addresses, Mapping):
        if isinstance(addresses, str | bytes) or not isinstance(addresses, Sequence):
            raise TypeError(
                f"Job {job!r} of {source} must be a list of addresses, or a mapping from the task index to the address, got "
                f"{type(addresses).__name__} {one_line(addresses)}."
            )
        addresses = dict(enumerate(addresses))
    checked: dict[int, str | None] = {}
    for key, address in addresses.items():
        index = task_index(key, f"A task index of job {job!r} of {source}")
        if address is not None and (not isinstance(address, str) or not address or address.split() != [address]):
            raise ValueError(
                f"The address of {job} {index} in {source} must be a host with a port, such as '10.0.0.1:8476', got "
                f"{one_line(address)}."
            )
        checked[index] = address
    return checked


def task_index(value: Any, name: str) -> int:
    """Returns a task index, an integer or its digits, as an integer. Messages begin with `name`."""
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} must be an integer >= 0, got {one_line(value)}.")
    return int(text)


def _check_different_addresses(tasks: list[_Task], source: str) -> None:
    names: dict[str, str] = {}
    for job, index, address in tasks:
        if address is not None and ":" in address and address in names:
            raise ValueError(
                f"{names[address]} and {job} {index} of {source} have the same address {address!r}. Each process needs its "
                "own port."
            )
        if address is not None:
            names[address] = f"{job} {index}"


def _select_task(
    tasks: tuple[_Task, ...], task_type: str | None, task_id: int | None, source: str
) -> tuple[str, int] | None:
    if task_type is None and task_id is None:
        return (tasks[0].job, tasks[0].task_id) if len(tasks) == 1 else None
    if task_type is None:
        raise ValueError(
            f"The task index is {task_id}, but the task type is not set. Set it to one of {', '.join(JOBS)}."
        )
    if task_type not in JOBS:
        raise ValueError(f"Unrecognized task type {task_type!r}: the task types are {', '.join(JOBS)}.")
    indices = [task.task_id for task in tasks if task.job == task_type]
    if task_id is None and len(indices) > 1:
        raise ValueError(
            f"The task index is not set, but {source} has {len(indices)} tasks of type {task_type!r}. Set it."
        )
    if not indices and task_type == "evaluator":  # often listed only in its own settings
        return task_type, task_id or 0
    if not indices:
        raise ValueError(
            f"The task type is {task_type!r}, but {source} has only {_counts(tasks)}. Add the job, or correct the task type."
        )
    index = indices[0] if task_id is None else task_index(task_id, "The task index")
    if index not in indices:
        bound = f" exceeds the maximum index {indices[-1]}" if index > indices[-1] else " is not in the job"
        raise ValueError(
            f"The task index {index} of job {task_type!r}{bound}: {source} has the tasks {indices}. Correct one."
        )
    return task_type, index


def _coordinator(argument: str | None, tasks: tuple[_Task, ...], task: tuple[str, int] | None, source: str) -> str:
    if argument is not None:
        return check_coordinator(argument, "`coordinator_address`")
    if task is not None and task[0] == "evaluator":
        return next((other.address for other in tasks if other.job == "evaluator" and other.address), "")
    members = _members(tasks)
    if not members:  # parameter servers only
        return ""
    job, index, address = members[0]
    if len(members) == 1:
        return address or ""
    if address is None:
        raise ValueError(
            f"The address of {job} {index} in {source} is unknown, where process 0 listens. Pass `coordinator_address`."
        )
    return check_coordinator(address, f"The address of {job} {index} in {source}, where process 0 listens,")


def _members(tasks: tuple[_Task, ...]) -> list[_Task]:
    """Returns the tasks that are processes of the cluster, ordered by process index."""
    return [task for task in tasks if task.job in _MEMBERS]


def _counts(tasks: tuple[_Task, ...]) -> str:
    jobs = [task.job for task in tasks]
    return ", ".join(f"{jobs.count(job)} {job!r}" for job in JOBS if job in jobs)
