"""A cheap first drawing of what follows, which the transformer then corrects.

The outcome of a grasp is a function of a few numbers (where the object lies from the hand, when the fingers close) that
takes some ten thousand examples to learn, whatever learns it. A transformer that draws every place of every frame at
every noise level is an expensive way to show a network an example: 1,500 steps of 8 windows show 5,400 grasps. The
draft is a recurrent network (GRU, Cho et al. 2014) over groups of four actions and what lies under each hand; it sees
an example for a small part of the cost, so many more of them.

It reads the episode's first frame and all of its actions, and no drawn frame: what it says of an outcome in the chunk
of the grasp it still says three chunks later. A window's history is eight frames, and where these were drawn, a
half-lifted object in them is taken for a lifted one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from services.wm_server.camera import CameraConfig
from services.wm_server.hand_views import HandViews
from services.wm_server.windows import CONDITION_FRAMES, FUTURE_LATENTS, GROUP_FRAMES

VIEW_FEATURES = 48
ANCHOR_FEATURES = 64
READS = "the episode's first frame and all of its actions so far, and no drawn frame"


class Draft(nn.Module):
    """Future latents of a window from the episode's first frame and its actions so far.

    Args:
        channels, height, width: of a latent frame.
        actions: numbers of an action after forward kinematics; 20, rotation columns.
        hidden: width of the recurrent state, which is the memory between chunks.
        camera: that took the anchor frames.
    """

    def __init__(self, channels: int, height: int, width: int, actions: int, hidden: int, camera: CameraConfig) -> None:
        super().__init__()
        self.shape = (channels, height, width)
        size = channels * height * width
        self.hand_views = HandViews(camera, VIEW_FEATURES)
        self.shows = nn.Sequential(nn.Linear(size, ANCHOR_FEATURES), nn.SiLU())
        self.start = nn.Sequential(nn.Linear(ANCHOR_FEATURES, hidden), nn.Tanh())
        entering = ANCHOR_FEATURES + 2 * VIEW_FEATURES + GROUP_FRAMES * actions
        self.enter = nn.Sequential(nn.Linear(entering, hidden), nn.SiLU())
        self.recurrent = nn.GRU(hidden, hidden, batch_first=True)
        # Remember to begin with (as for LSTMs, Jozefowicz et al. 2015, section 5): a grasp decides 25 groups later.
        update = slice(hidden, 2 * hidden)
        nn.init.constant_(self.recurrent.get_parameter("bias_ih_l0")[update], 2.0)
        last = nn.Linear(2 * hidden, size)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.draw = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), last)

    def memory(self, anchor_latent: Tensor, anchor: Tensor, past: Tensor, chunks: Tensor) -> Tensor:
        """The state (batch, hidden) before a chunk.

        Args:
            anchor_latent: (batch, channels, height, width), the first frame's latent.
            anchor: (batch, 3, 16 height, 16 width), the first frame in [-1, 1].
            past: (batch, k, 61, actions), conditioning of the windows of the chunks before; padded at the end.
            chunks: int64 (batch,), how many of the k are an episode's own.
        """
        shown = self.shows(anchor_latent.flatten(1))
        before = self.start(shown)[:, None]
        if past.shape[1]:
            after, _ = self.recurrent(self._seen(shown, past, anchor), before.transpose(0, 1).contiguous())
            before = torch.cat([before, after], 1)
        state: Tensor = before[torch.arange(len(before), device=before.device), FUTURE_LATENTS * chunks]
        return state

    def forward(self, memory: Tensor, anchor_latent: Tensor, anchor: Tensor, conditioning: Tensor) -> Tensor:
        """The chunk after `memory`.

        Args:
            memory: (batch, hidden), of `memory`.
            anchor_latent, anchor: as in `memory`.
            conditioning: (batch, 61, actions) in [-1, 1], of the window.

        Returns:
            (batch, channels, 13, height, width).
        """
        shown = self.shows(anchor_latent.flatten(1))
        states, _ = self.recurrent(self._seen(shown, conditioning[:, None], anchor), memory[None].contiguous())
        return self._drawn(states)

    def episode(self, anchor_latent: Tensor, anchor: Tensor, conditioning: Tensor) -> Tensor:
        """All k chunks of whole episodes at once, as `memory` and `forward` give them one after the other.

        Args:
            anchor_latent, anchor: as in `memory`.
            conditioning: (batch, k, 61, actions).

        Returns:
            (batch, channels, 13 k, height, width).
        """
        shown = self.shows(anchor_latent.flatten(1))
        states, _ = self.recurrent(self._seen(shown, conditioning, anchor), self.start(shown)[None])
        return self._drawn(states)

    def _seen(self, shown: Tensor, conditioning: Tensor, anchor: Tensor) -> Tensor:
        """(batch, k, 61, actions) to the recurrent network's input (batch, 13 k, hidden)."""
        future = conditioning[:, :, CONDITION_FRAMES:].flatten(1, 2)
        groups = future.unflatten(1, (-1, GROUP_FRAMES)).flatten(2)
        always = shown[:, None].expand(-1, groups.shape[1], -1)
        entered: Tensor = self.enter(torch.cat([always, self.hand_views(future, anchor), groups], -1))
        return entered

    def _drawn(self, states: Tensor) -> Tensor:
        drawn: Tensor = self.draw(states).unflatten(2, self.shape).transpose(1, 2)
        return drawn
