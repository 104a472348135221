"""The draft: what it reads, in the order of time."""

import torch

from services.wm_server.camera import CameraConfig
from services.wm_server.draft import Draft, group_actions


def draft() -> Draft:
    """With an output layer that is not zero, as after training."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        made = Draft(4, 2, 4, actions=20, hidden=16, camera=CameraConfig())
        torch.nn.init.normal_(made.draw[2].weight)
    return made.requires_grad_(False)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    condition = torch.randn(2, 4, 3, 2, 4, generator=generator)
    conditioning = 2.0 * torch.rand(2, 61, 20, generator=generator) - 1.0
    return condition, conditioning, 2.0 * torch.rand(2, 3, 32, 64, generator=generator) - 1.0


def test_actions_are_grouped_like_latent_frames() -> None:
    actions = torch.arange(9.0)[None, :, None]
    assert group_actions(actions)[0].tolist() == [[0, 0, 0, 0], [1, 2, 3, 4], [5, 6, 7, 8]]


def test_the_future_does_not_reach_back() -> None:
    """Actions 41 to 44 are latent frame 11, the ninth of the 13 future ones."""
    condition, conditioning, anchor = inputs()
    before = draft()(condition, conditioning, anchor)
    assert before.shape == (2, 4, 13, 2, 4)
    conditioning[:, 41] += 0.5
    after = draft()(condition, conditioning, anchor)
    assert torch.equal(before[:, :, :8], after[:, :, :8])
    assert not torch.isclose(before[:, :, 8:], after[:, :, 8:]).all(dim=(1, 3, 4)).any()


def test_it_reads_history_and_the_anchors_pixels() -> None:
    condition, conditioning, anchor = inputs()
    before = draft()(condition, conditioning, anchor)
    assert not torch.allclose(before, draft()(condition + 1.0, conditioning, anchor) - 1.0)
    assert not torch.allclose(before, draft()(condition, conditioning, -anchor))


def test_episodes_of_a_batch_do_not_meet() -> None:
    condition, conditioning, anchor = inputs()
    both = draft()(condition, conditioning, anchor)
    torch.testing.assert_close(both[1:], draft()(condition[1:], conditioning[1:], anchor[1:]))
