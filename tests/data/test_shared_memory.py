"""What workers hand over: the same pixels, in a slot or beside it, and no new memory each time."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from finetune.data.shared_memory import Slots, shared_memory


def image(number: int, size: tuple[int, int] = (3, 4)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def reads(images: list[np.ndarray]) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    return (lambda room, image=image: image for image in images)  # type: ignore[misc]


def test_images_come_over_from_another_process() -> None:
    slots = Slots(2, 1000)
    images = [image(0), image(1, (5, 2))[:, ::-1], image(2)]
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    process = fork.Process(target=lambda: queue.put(slots.put(1, reads(images))))
    process.start()
    put = queue.get()
    process.join(30)
    assert put == [(3, 4, 3), (5, 2, 3), (3, 4, 3)]  # no pixels in the queue
    for mine, other in zip(slots.take(1, put), images, strict=True):
        np.testing.assert_array_equal(mine.permute(1, 2, 0), other)


@pytest.mark.parametrize("room", [0, 35, 36, 71, 72, 200])
def test_images_without_room_come_beside_the_slot(room: int) -> None:
    slots = Slots(1, room)
    images = [image(0), image(1, (9, 9)), image(2)]
    put = slots.put(0, reads(images))
    assert sum(isinstance(one, tuple) for one in put) == min(room // 36, 2)
    for mine, other in zip(slots.take(0, put), images, strict=True):
        np.testing.assert_array_equal(mine.permute(1, 2, 0), other)


def test_an_image_may_be_decoded_into_its_place() -> None:
    slots, rooms = Slots(1, 120), []

    def read(room: np.ndarray) -> np.ndarray:
        rooms.append(room.size)
        room[:36] = image(0).reshape(-1)
        return room[:36].reshape(3, 4, 3)

    put = slots.put(0, [read, lambda room: image(1), read])
    assert rooms == [120, 48]
    for mine, other in zip(slots.take(0, put), [image(0), image(1), image(0)], strict=True):
        np.testing.assert_array_equal(mine.permute(1, 2, 0), other)


def test_memory_is_only_promised() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = shared_memory(2**36)
    memory[[0, -1]] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB
