"""A cheap first drawing of a window's future, which the transformer then corrects.

The outcome of a grasp is a function of a few numbers (where the object lies from the hand, when the fingers close) that
takes some ten thousand examples to learn, whatever learns it. A transformer that draws every place of every frame at
every noise level is an expensive way to show a network an example: 1,500 steps of 8 windows show 5,400 grasps. The
draft is a recurrent network (GRU, Cho et al. 2014) over groups of four actions and what lies under each hand; it sees
one for a fifteenth of the cost, so many more of them. It has no noise level and no place of its own in a frame, and is
trained by the same square error on latents.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from services.wm_server.camera import CameraConfig
from services.wm_server.hand_views import HandViews
from services.wm_server.windows import CONDITION_LATENTS, GROUP_FRAMES

VIEW_FEATURES = 48


def group_actions(conditioning: Tensor) -> Tensor:
    """(batch, 4n+1, d) to (batch, n+1, 4d): the first frame's action is repeated three more times."""
    first = conditioning[:, :1].expand(-1, GROUP_FRAMES - 1, -1)
    return torch.cat([first, conditioning], 1).unflatten(1, (-1, GROUP_FRAMES)).flatten(2)


class Draft(nn.Module):
    """Future latents from condition, actions and anchor frame.

    Args:
        channels, height, width: of a latent frame.
        actions: numbers of an action after forward kinematics; 20, rotation columns.
        hidden: width of the recurrent state.
        camera: that took the anchor frames.
    """

    def __init__(self, channels: int, height: int, width: int, actions: int, hidden: int, camera: CameraConfig) -> None:
        super().__init__()
        self.shape = (channels, height, width)
        size = channels * height * width
        self.hand_views = HandViews(camera, VIEW_FEATURES)
        self.start = nn.Sequential(
            nn.Linear(CONDITION_LATENTS * size, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.Tanh()
        )
        self.enter = nn.Sequential(nn.Linear(2 * VIEW_FEATURES + GROUP_FRAMES * actions, hidden), nn.SiLU())
        self.recurrent = nn.GRU(hidden, hidden, batch_first=True)
        last = nn.Linear(2 * hidden, size)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.draw = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), last)

    def forward(self, condition: Tensor, conditioning: Tensor, anchor: Tensor) -> Tensor:
        """A drawing of the future.

        Args:
            condition: (batch, channels, 3, height, width), anchor and history latents.
            conditioning: (batch, 61, actions) in [-1, 1].
            anchor: (batch, 3, 16 height, 16 width), the episode's first frame in [-1, 1].

        Returns:
            (batch, channels, 13, height, width).
        """
        seen = torch.cat([self.hand_views(conditioning, anchor), group_actions(conditioning)], -1)
        state = self.start(condition.transpose(1, 2).flatten(1))
        states, _ = self.recurrent(self.enter(seen), state[None])
        change = self.draw(states[:, CONDITION_LATENTS:]).unflatten(2, self.shape).transpose(1, 2)
        drawn: Tensor = condition[:, :, -1:] + change
        return drawn
