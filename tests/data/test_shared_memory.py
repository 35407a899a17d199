"""Workers return the same pixels, in a shared buffer or pickled, without new memory each time."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from finetune.data.shared_memory import SharedBatchBuffers, allocate_shared_memory


def random_image(number: int, size: tuple[int, int] = (3, 4)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def decoders(images: list[np.ndarray]) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    return (lambda buffer, image=image: image for image in images)  # type: ignore[misc]


def test_images_arrive_from_another_process() -> None:
    buffers = SharedBatchBuffers(2, 1000)
    images = [random_image(0), random_image(1, (5, 2))[:, ::-1], random_image(2)]
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    process = fork.Process(target=lambda: queue.put(buffers.write(1, decoders(images))))
    process.start()
    written = queue.get()
    process.join(30)
    assert written == [(3, 4, 3), (5, 2, 3), (3, 4, 3)]  # no pixels in the queue
    for received, expected in zip(buffers.read(1, written), images, strict=True):
        np.testing.assert_array_equal(received.permute(1, 2, 0), expected)


@pytest.mark.parametrize("buffer_bytes", [0, 35, 36, 71, 72, 200])
def test_images_that_do_not_fit_are_pickled(buffer_bytes: int) -> None:
    buffers = SharedBatchBuffers(1, buffer_bytes)
    images = [random_image(0), random_image(1, (9, 9)), random_image(2)]
    written = buffers.write(0, decoders(images))
    assert sum(isinstance(item, tuple) for item in written) == min(buffer_bytes // 36, 2)
    for received, expected in zip(buffers.read(0, written), images, strict=True):
        np.testing.assert_array_equal(received.permute(1, 2, 0), expected)


def test_images_may_be_decoded_into_the_buffer() -> None:
    buffers, buffer_sizes = SharedBatchBuffers(1, 120), []

    def decode_into_buffer(buffer: np.ndarray) -> np.ndarray:
        buffer_sizes.append(buffer.size)
        buffer[:36] = random_image(0).reshape(-1)
        return buffer[:36].reshape(3, 4, 3)

    written = buffers.write(
        0, [decode_into_buffer, lambda buffer: random_image(1), decode_into_buffer]
    )
    assert buffer_sizes == [120, 48]
    for received, expected in zip(
        buffers.read(0, written), [random_image(0), random_image(1), random_image(0)], strict=True
    ):
        np.testing.assert_array_equal(received.permute(1, 2, 0), expected)


def test_memory_is_reserved_but_not_committed() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = allocate_shared_memory(2**36)
    memory[[0, -1]] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB
