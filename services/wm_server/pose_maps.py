"""Where the hands are, drawn into the camera's frame: the action path that is resolved in space.

A vector of poses says everything about a hand, but a small network learns the way from poses to pixels slowly, and a
grasp is decided by less than a pixel. Given the camera, that way is known: the points of both grippers are projected
(pinhole camera, Hartley and Zisserman 2004, section 6.1) and drawn as Gaussian spots on a grid of four-pixel cells,
finer than latents (16 pixels) and, by the spots' shape, finer than the cells. Poses drawn as images condition other
world models too (EnerVerse-AC, Jiang et al. 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from services.wm_server.camera import CameraConfig, PosesInCamera
from services.wm_server.windows import GROUP_FRAMES

CELL_PIXELS = 4
POINTS = 6  # an arm's: link 6, tool centre, two finger tips, tool centre dropped to the table, tool centre by height


class PoseMaps(PosesInCamera):
    """Channels for every latent frame from its four poses and the anchor frame, made at a quarter of the resolution.

    Args:
        height, width: of the frames in pixels.
        camera: that took the anchor frames.
        channels: given out at every four-pixel cell; a latent position gets 16 times as many.
    """

    def __init__(self, height: int, width: int, camera: CameraConfig, channels: int, hidden: int = 16) -> None:
        super().__init__(camera)
        self.rows, self.columns, self.aspect = height // CELL_PIXELS, width // CELL_PIXELS, width / height
        self.anchor = nn.Conv2d(3 * CELL_PIXELS**2, 16, 3, padding=1)
        self.mix = nn.Sequential(
            nn.Conv2d(16 + GROUP_FRAMES * POINTS, hidden, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(hidden, hidden, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(hidden, channels, 1),
        )
        for layer in self.mix:
            if isinstance(layer, nn.Conv2d):  # twice as fast on a CPU
                layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)

    def points(self, conditioning: Tensor) -> tuple[Tensor, Tensor]:
        """Points of both arms (..., 2, 6, 3) in metres and the strength of their spots (..., 2, 6)."""
        arms = self.arms(conditioning)
        place, ahead, aside, open_ = arms[..., :3], arms[..., 3:6], arms[..., 6:9], arms[..., 9:]
        tool = place + self.camera.tool_centre_m * ahead
        reach = (0.005 + self.camera.finger_reach_m * open_) * aside
        shadow = torch.cat([tool[..., :2], torch.full_like(tool[..., :1], self.camera.object_height_m)], -1)
        points = torch.stack([place, tool, tool + reach, tool - reach, shadow, tool], -2)
        strength = torch.ones(points.shape[:-1], device=points.device)
        height = 10.0 * (tool[..., 2] - self.camera.object_height_m)
        strength = torch.cat([strength[..., :5], height[..., None].clamp(-1.0, 3.0)], -1)
        return points, strength

    def spots(self, conditioning: Tensor) -> Tensor:
        """(batch, frames, 20) to (batch, frames, 6, rows, columns), float32: spots of both arms together.

        Never under autocast: bf16 has 8 bits for a place in the frame, which moves spots by up to 0.8 pixels.
        """
        with torch.autocast(conditioning.device.type, enabled=False):
            return self._spots(conditioning.float())

    def _spots(self, conditioning: Tensor) -> Tensor:
        points, strength = self.points(conditioning)
        across = self.seen_at(points)
        column = (across[..., 0] / self.aspect + 1.0) * self.columns / 2.0
        row = (across[..., 1] + 1.0) * self.rows / 2.0
        columns = torch.arange(self.columns, device=column.device) + 0.5
        rows = torch.arange(self.rows, device=row.device) + 0.5
        wide = torch.exp(-0.5 * ((columns - column[..., None]) / 0.8).square())
        tall = torch.exp(-0.5 * ((rows - row[..., None]) / 0.8).square()) * strength[..., None]
        return torch.einsum("bfapr,bfapc->bfprc", tall, wide)

    def forward(self, conditioning: Tensor, anchor: Tensor) -> Tensor:
        """(batch, 4n+1, 20), anchor (batch, 3, height, width) to (batch, 16 channels, n+1, rows/4, columns/4)."""
        spots = self.spots(conditioning)
        first = spots[:, :1].expand(-1, GROUP_FRAMES - 1, -1, -1, -1)
        groups = torch.cat([first, spots], 1).unflatten(1, (-1, GROUP_FRAMES)).flatten(2, 3)
        batch, number = groups.shape[:2]
        seen = self.anchor(nn.functional.pixel_unshuffle(anchor, CELL_PIXELS))
        seen = seen.repeat_interleave(number, 0)
        mixed = self.mix(torch.cat([seen, groups.flatten(0, 1)], 1))
        maps: Tensor = nn.functional.pixel_unshuffle(mixed, 4)
        return maps.unflatten(0, (batch, number)).transpose(1, 2)
