"""What a model sees of its ranks: groups by layout, and four calls against sums and stacks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from metainfer.comm.agree import DisagreementError
from metainfer.comm.api import Communicator
from metainfer.comm.backends.local import LocalGroup
from metainfer.comm.peers import ALONE, Linked, Place
from metainfer.comm.plan_offers import Ability
from metainfer.core.errors import InternalError
from metainfer.core.plan import LayoutPlan
from metainfer.planner.layouts import enumerate_layouts


def linked(group: LocalGroup, rank: int) -> Linked:
    comm = group.ranks[rank]
    found = Communicator({"local": comm}, [Ability(backend="local", slots=comm.slots)])
    found.agree_on_rules(lambda mine: [mine])
    return Linked(rank, len(group.ranks), found)


def everywhere(world: int, call: Callable[[Linked], Tensor]) -> list[Tensor]:
    """`call` on every rank, on threads over the `local` backend; 256-byte slots cut everything."""
    with LocalGroup(world, slot_bytes=256) as group, ThreadPoolExecutor(world) as pool:
        links = [linked(group, rank) for rank in range(world)]
        return list(pool.map(call, links))


def part(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_calls_are_what_they_say(world: int, rows: int) -> None:
    parts = [part(rank, rows, 6) for rank in range(world)]
    total = torch.stack(parts).sum(0)
    for found in everywhere(world, lambda link: link.sum(parts[link.rank].clone())):
        assert torch.equal(found, total)
    for found in everywhere(world, lambda link: link.rows(parts[link.rank])):
        assert torch.equal(found, torch.cat(parts))
    for found in everywhere(world, lambda link: link.columns(parts[link.rank])):
        assert torch.equal(found, torch.cat(parts, dim=1))
    wide = [part(10 + rank, world * rows, 6) for rank in range(world)]
    whole = torch.stack(wide).sum(0)
    for rank, found in enumerate(everywhere(world, lambda link: link.sum_rows(wide[link.rank]))):
        assert torch.equal(found, whole[rank * rows : (rank + 1) * rows])


def test_a_transposed_input_is_not_taken_as_it_lies() -> None:
    parts = [part(rank, 6, 4).T for rank in range(2)]
    for found in everywhere(2, lambda link: link.sum(parts[link.rank])):
        assert torch.equal(found, parts[0] + parts[1])


def test_alone_gives_back_the_tensor_itself() -> None:
    x = torch.ones(2, 3)
    assert all(call(x) is x for call in (ALONE.sum, ALONE.rows, ALONE.columns, ALONE.sum_rows))


def test_groups_of_every_layout_fit_each_other() -> None:
    for ranks in (2, 4, 6, 8):
        for layout in enumerate_layouts(ranks, 64):
            places = [Place(layout, rank) for rank in range(layout.ranks)]
            for place in places:
                for role, members in place.groups().items():
                    assert place.rank in members
                    # Every member sees the same group in the same order.
                    assert all(places[each].groups()[role] == members for each in members)
                sizes = {role: len(members) for role, members in place.groups().items()}
                assert sizes.get("tensor", 1) == layout.tensor
                assert sizes.get("expert", 1) == max(1, layout.expert)
                assert place.shares_tokens == ("domains" in sizes)
                assert sizes.get("domains", 1) == max(1, layout.expert // layout.tensor)


def test_places_of_a_mixed_layout() -> None:
    layout = LayoutPlan(name="tp2ep4", tensor=2, data=2, expert=4)
    third = Place(layout, 2)
    assert third.domain == 1
    assert third.groups() == {"tensor": (2, 3), "expert": (0, 1, 2, 3), "domains": (0, 2)}


def test_rules_have_to_be_agreed_on_before_a_call() -> None:
    with LocalGroup(2) as group:
        comm = group.ranks[0]
        found = Communicator({"local": comm}, [Ability(backend="local", slots=comm.slots)])
        with pytest.raises(InternalError, match="was not planned and agreed on"):
            Linked(0, 2, found).sum(torch.zeros(3))


def test_rules_that_differ_stop_every_rank() -> None:
    with LocalGroup(2) as group:
        able = [Ability(backend="local", slots=group.ranks[0].slots)]
        ranks = [Communicator({}, able), Communicator({}, able, deterministic=True)]
        sent: list[bytes] = []

        def heard(mine: bytes) -> list[bytes]:
            sent.append(mine)
            return [mine, b"another" if len(sent) == 1 else mine]

        with pytest.raises(DisagreementError):
            ranks[0].agree_on_rules(heard)
        turns = iter(sent)
        told = "deterministic: false on rank 0, true on rank 1"
        with pytest.raises(DisagreementError, match=told):
            ranks[1].agree_on_rules(lambda mine: [next(turns), mine])
