"""Groups pulled by an engine as its slots become free, and rows that have become too old."""

from collections.abc import Callable, Iterator, Mapping

from rlkit.engines.requests import Request, Response
from rlkit.engines.torch_engine import TorchEngine


def serve(
    engine: TorchEngine, pull: Callable[[], Request | None]
) -> Iterator[tuple[Request, list[Response]]]:
    """Each group with all its responses, as the last of them finishes.

    ``pull()`` gives the next group, or None if there is none for now; it is asked before every
    token while slots are free, so of several engines the quicker ones take more. Ends once nothing
    runs and there is no next group. A group with a row that someone else aborted is not given.
    Leaving it early aborts the groups it has begun; so does an engine that is paused or asleep when
    the next token is due, with an error.
    """
    begun: dict[int, Request] = {}  # by uid
    done: dict[int, Response] = {}
    try:
        while True:
            while engine.num_free and (request := pull()) is not None:
                engine.add(request)
                begun |= dict.fromkeys(request.uids, request)
            if not (engine.waiting or engine.rows):
                return
            engine.check_awake()
            for response in engine.step():
                done[response.uid] = response
                request = begun.get(response.uid)
                if request and done.keys() >= set(request.uids):
                    yield request, [done.pop(uid) for uid in request.uids]
                    for uid in request.uids:
                        del begun[uid]
    finally:
        engine.abort(begun)


def too_old(first_versions: Mapping[int, int], *, version: int, max_age: int) -> list[int]:
    """Uids whose first token is more than ``max_age`` versions older than ``version``.

    ``engine.abort(too_old(engine.first_versions(), version=engine.version, max_age=4))`` ends them;
    adding their prompts again, with the same uids or others, starts them anew.
    """
    return [uid for uid, first in first_versions.items() if version - first > max_age]
