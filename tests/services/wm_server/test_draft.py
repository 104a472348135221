"""The draft: what it reads, in the order of time, and what it remembers."""

import torch

from services.wm_server.camera import CameraConfig
from services.wm_server.draft import Draft


def draft() -> Draft:
    """With an output layer that is not zero, as after training."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        made = Draft(4, 2, 4, actions=20, hidden=16, camera=CameraConfig())
        torch.nn.init.normal_(made.draw[2].weight)
    return made.requires_grad_(False)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Anchor latents (2, 4, 2, 4), anchors (2, 3, 32, 64), conditioning of four windows each (2, 4, 61, 20)."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, 2, 4, generator=generator)
    anchors = 2.0 * torch.rand(2, 3, 32, 64, generator=generator) - 1.0
    return latents, anchors, 2.0 * torch.rand(2, 4, 61, 20, generator=generator) - 1.0


NONE = torch.zeros(2, dtype=torch.int64)


def test_the_future_does_not_reach_back() -> None:
    """Window frame 9 + 32 is in the ninth group of the 13 future ones."""
    latents, anchors, windows = inputs()
    made = draft()
    memory = made.memory(latents, anchors, windows[:, :0], NONE)
    before = made(memory, latents, anchors, windows[:, 0])
    assert before.shape == (2, 4, 13, 2, 4)
    windows[:, 0, 9 + 32] += 0.5
    after = made(memory, latents, anchors, windows[:, 0])
    torch.testing.assert_close(before[:, :, :8], after[:, :, :8])
    assert not torch.isclose(before[:, :, 8:], after[:, :, 8:]).all(dim=(1, 3, 4)).any()


def test_chunk_by_chunk_it_draws_what_it_draws_of_the_whole_episode() -> None:
    latents, anchors, windows = inputs()
    made = draft()
    whole = made.episode(latents, anchors, windows)
    assert whole.shape == (2, 4, 4 * 13, 2, 4)
    for chunk in range(4):
        memory = made.memory(latents, anchors, windows[:, :chunk], NONE + chunk)
        drawn = made(memory, latents, anchors, windows[:, chunk])
        torch.testing.assert_close(drawn, whole[:, :, 13 * chunk : 13 * (chunk + 1)])


def test_episodes_of_other_lengths_in_a_batch_change_nothing() -> None:
    """The first episode has one chunk behind it, the second three; padding is never read."""
    latents, anchors, windows = inputs()
    made = draft()
    both = made.memory(latents, anchors, windows[:, :3], torch.tensor([1, 3]))
    torch.testing.assert_close(both[:1], made.memory(latents[:1], anchors[:1], windows[:1, :1], torch.tensor([1])))
    torch.testing.assert_close(both[1:], made.memory(latents[1:], anchors[1:], windows[1:, :3], torch.tensor([3])))


def test_it_reads_the_first_frame_its_pixels_and_actions_long_ago() -> None:
    latents, anchors, windows = inputs()
    made = draft()
    before = made.episode(latents, anchors, windows)[:, :, -1]
    assert not torch.allclose(before, made.episode(latents + 1.0, anchors, windows)[:, :, -1])
    assert not torch.allclose(before, made.episode(latents, -anchors, windows)[:, :, -1])
    windows[:, 0, 30] += 0.5
    assert not torch.equal(before, made.episode(latents, anchors, windows)[:, :, -1])
