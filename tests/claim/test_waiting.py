"""How GPUs go from hand to hand, what those who wait see by themselves, and what they ask the driver for that."""

import itertools

import pytest
from support import api
from support.claims import claim
from support.state import simulated_doors

PATIENCE = 60.0  # seconds, that only a hang reaches


# From hand to hand


def test_the_ticket_goes_before_the_second_poll(host, dgx, in_first_pause) -> None:
    """So those behind look while the driver is asked."""
    dgx.hold(0)
    seen = []

    def look(event: str) -> None:
        if event == "usage":
            seen.append((dgx.tickets(), dgx.claimed()))

    host.on_event = look
    in_first_pause(dgx.let_go)
    claim(only=0, timeout=PATIENCE)
    assert seen[0] == ([], [0])


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "it releases"])
def test_what_has_gone_is_known_without_another_poll(host, dgx, child, rarely_polled, in_first_pause, ends) -> None:
    """Else GPUs that are freed together would be polled by one waiter after the other: each sleeps with an old poll."""
    holder = child("listen()")
    context = host.stranger(0, pid=holder.pid)
    dgx.hold(0, pid=holder.pid)

    def free() -> None:
        context.close()
        if ends:
            holder.kill()
        dgx.let_go()
        host.events.clear()

    in_first_pause(free)
    assert claim(only=0, timeout=PATIENCE).devices_taken == [0]
    assert set(host.events) <= {"usage", "close"}


def test_a_holder_that_keeps_its_context_is_found_by_the_second_poll(
    host, dgx, child, often_polled, same_gpus, in_first_pause
) -> None:
    """The GPU is given back, and tried no more before the driver shows that it is free."""
    holder = child("listen()")
    context = host.stranger(0, pid=holder.pid)
    dgx.hold(0, pid=holder.pid)

    def let_go() -> None:
        dgx.let_go()
        host.events.clear()

    def end(event: str) -> None:
        """When it is known to be there, and the ticket has come back."""
        if host.events == ["usage", "poll"]:
            in_first_pause(leave)

    def leave() -> None:
        assert (dgx.claimed(), len(dgx.tickets())) == ([], 1)
        context.close()

    in_first_pause(let_go)
    host.on_event = end
    assert claim(only=0, timeout=PATIENCE).devices_taken == [0]
    assert host.events.count("usage") == 3, "the one that failed, the one that did not, and that at the end of a claim"


def test_a_gpu_without_some_processes() -> None:
    def process(pid: int, size: int | None) -> api.GpuProcess:
        return api.GpuProcess(pid, memory_used=size)

    gpu = api.Gpu(0, "GPU-0", memory_total=100, memory_used=50, memory_free=50)
    gpu = gpu._replace(processes=(process(1, 20), process(1, 20), process(2, 10), process(3, None)))
    left = gpu.without({1, 3})
    assert left.processes == (process(2, 10),)
    assert (left.memory_used, left.memory_free) == (30, 70), "what nobody knows of 3 is still in use"
    assert left.unexplained_memory == 20
    assert gpu.without({9}) is gpu
    assert api.Gpu(0, "GPU-0", processes=None).without({1}).processes is None


def test_who_has_waited_asks_whether_the_host_has_the_same_gpus(host, dgx, monkeypatch, in_first_pause) -> None:
    """However new its poll is: the indices may have moved since."""
    asked: list[api.HostSnapshot] = []
    monkeypatch.setattr(host, "shows_same", lambda snapshot: asked.append(snapshot) or True)
    claim(only=0).release_gpus()
    assert asked == []
    dgx.hold(0)
    in_first_pause(dgx.let_go)
    claim(only=0, timeout=PATIENCE)
    assert len(asked) == 1


# What the head sees


def test_a_gpu_that_comes_back_is_seen_though_nothing_else_happens(host, dgx, often_polled) -> None:
    """It was lost when the claim began to wait, and nobody ends a claim."""
    dgx.hold(*range(7))
    lost = {"lost": True, "unusable": "lost", "processes": None}
    host.edits = {host.uuids[7]: lost}
    host.on_poll = lambda number: number == 3 and host.edits.clear()
    assert claim(only="6,7", timeout=PATIENCE).devices_taken == [7]


def test_a_ticket_names_the_gpus_that_come_while_it_waits(host, dgx, monkeypatch, often_polled) -> None:
    """At its old place: others must not take one past it."""
    dgx.hold(*range(8))
    shown, tickets = host.snapshot, []
    is_there = False

    def snapshot() -> api.HostSnapshot:
        found = shown()
        return found if is_there else found._replace(gpus=found.gpus[:-1])

    def come(number: int) -> None:
        nonlocal is_there
        is_there = number >= 3
        tickets.extend((one.number, len(one.gpus)) for one in api.waiting_tickets())
        if number == 5:
            dgx.let_go(7)

    monkeypatch.setattr(host, "snapshot", snapshot)
    host.on_poll = come
    assert claim(timeout=PATIENCE).devices_taken == [7]
    assert sorted(set(tickets)) == [(1, 7), (1, 8)]


def test_the_end_of_a_stranger_is_seen_by_its_pid(host, child, rarely_polled, in_first_pause) -> None:
    stranger = child("listen()")
    context = host.stranger(0, pid=stranger.pid)

    def leave() -> None:
        context.close()
        stranger.kill()
        host.events.clear()

    in_first_pause(leave)
    assert claim(only=0, timeout=PATIENCE).devices_taken == [0]
    assert set(host.events) <= {"usage", "close"}


def test_the_end_of_a_stranger_whose_pid_means_nothing_here_is_seen_by_a_poll(host, often_polled) -> None:
    context = host.stranger(0, pid=999_999_999)
    host.on_poll = lambda number: number == 4 and context.close()
    assert claim(only=0, timeout=PATIENCE).devices_taken == [0]


def test_the_driver_is_asked_soon_at_first_and_then_rarely() -> None:
    """600 calls of NVML for eight GPUs are some ten polls."""
    times = [0.0]
    while times[-1] < 600:
        times.append(times[-1] + api.pause_between_polls(times[-1]))
    assert times[1] <= 0.5
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 10
    for begin in times:
        assert sum(begin <= one < begin + 60 for one in times) <= 10


def test_the_driver_is_asked_soon_again_when_other_gpus_are_free(host, monkeypatch, often_polled) -> None:
    """What the driver shows of a GPU that another state directory freed may go a little later."""
    first, second = simulated_doors(), simulated_doors()
    assert first.take_whole(host.uuids[0], ())
    calm_times = []

    def pause(calm: float) -> float:
        calm_times.append(calm)
        if len(calm_times) == 6:
            first.release()
            assert second.take_whole(host.uuids[1], ())
        if len(calm_times) == 12:
            second.release()
        return api.pause_between_polls(calm)

    monkeypatch.setattr(api.search, "pause_between_polls", pause)
    assert claim(2, only="0,1", timeout=PATIENCE).devices_taken == [0, 1]
    assert min(calm_times[6:]) < calm_times[5] / 2


def test_claims_are_asked_often_at_first_and_never_rarely() -> None:
    assert api.pause_of_watch(0) == api.pause_of_watch(1) == 0.01
    assert api.pause_of_watch(20) == pytest.approx(0.04)
    assert api.pause_of_watch(86400) == 0.1
