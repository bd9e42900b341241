"""Worker groups whose ranks are threads of this process: what a Resharder asks of a group."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from rlkit.cluster.calls import public_methods
from rlkit.workers.context import WorkerContext


class ThreadGroup:
    """``n`` workers of a class; calls run on all of them at once."""

    in_process = False

    def __init__(self, cls, model, *, n=1, name="group", timeout_s=20):
        contexts = [WorkerContext.at(i, n, None, timeout_s=timeout_s) for i in range(n)]
        self.workers = [cls(model, context=context) for context in contexts]
        self.name, self.methods = name, public_methods(cls)
        self.pool = ThreadPoolExecutor(n)
        self.beside = None

    @property
    def processes(self):
        return tuple(map(id, self.workers))

    @property
    def submit(self):
        return _Submit(self)

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.start(name, args, kwargs).result()

    @property
    def version(self):
        return self.workers[0].version

    def __len__(self):
        return len(self.workers)

    def shares_devices(self, other):
        return other in (self, self.beside) or self is other.beside

    def start(self, name, args, kwargs):
        futures = [
            self.pool.submit(getattr(worker, name), *args, **kwargs) for worker in self.workers
        ]

        def result():
            found = [future.result(timeout=60) for future in futures]
            return found[0] if len(found) == 1 else found

        return SimpleNamespace(result=result, cancel=lambda: None)


class _Submit:
    def __init__(self, group):
        self.group = group

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.group.start(name, args, kwargs)
