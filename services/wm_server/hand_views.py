"""What lies under each hand, seen from the hand: the anchor frame resampled around the tool centre.

Whether a grasp holds depends on where the object is *relative to the hand*, to a few millimetres and degrees. A pose
and a picture both say where things are in their own frame, and a small network does not learn to subtract the one from
the other. Given the camera it need not: a square of the plane in which objects lie is laid under the tool centre and
turned with the fingers, projected into the anchor frame and read off there between the pixels (spatial transformer,
Jaderberg et al. 2015, section 3.3, with known geometry in the place of the localisation network). In that view an
object between the fingers looks the same wherever on the table it lies. Nothing about tasks or outcomes is in it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.wm_server.camera import CameraConfig, PosesInCamera
from services.wm_server.windows import GROUP_FRAMES

VIEW_PIXELS = 20
VIEW_PIXEL_M = 0.007
HAND_NUMBERS = 6  # of a frame: height, tilt along and across the fingers, down, tilt of the fingers, gripper


class HandViews(PosesInCamera):
    """Features of both hands for every latent frame, from its four poses and the anchor frame.

    Args:
        camera: that took the anchor frames.
        features: given out for each hand.
        hidden: channels of the convolutions over a view.
    """

    def __init__(self, camera: CameraConfig, features: int, hidden: int = 32) -> None:
        super().__init__(camera)
        self.see = nn.Sequential(
            nn.PixelUnshuffle(2),
            nn.Conv2d(12, hidden, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(hidden, hidden, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(hidden * (VIEW_PIXELS // 4) ** 2, features),
        )
        self.combine = nn.Sequential(
            nn.Linear(features + GROUP_FRAMES * HAND_NUMBERS, 2 * features),
            nn.SiLU(),
            nn.Linear(2 * features, features),
        )

    def views(self, hands: Tensor, anchor: Tensor) -> Tensor:
        """Hands (batch, n, 10) in metres, anchor (batch, 3, height, width) to (batch, n, 3, 20, 20), float32.

        Rows go along the fingers, columns across them; what the camera does not see repeats its edge.
        """
        batch, number = hands.shape[:2]
        tool = hands[..., :3] + self.camera.tool_centre_m * hands[..., 3:6]
        steps = (torch.arange(VIEW_PIXELS, device=hands.device) - (VIEW_PIXELS - 1) / 2) * VIEW_PIXEL_M
        along, across = _axes(hands)
        plane = tool[..., None, None, :2] + steps[:, None, None] * along[..., None, None, :]
        plane = plane + steps[None, :, None] * across[..., None, None, :]
        points = torch.cat([plane, torch.full_like(plane[..., :1], self.camera.object_height_m)], -1)
        seen = self.seen_at(points)
        grid = torch.stack([seen[..., 0] * anchor.shape[2] / anchor.shape[3], seen[..., 1]], -1)
        sampled = F.grid_sample(
            anchor.float(), grid.flatten(1, 2), mode="bilinear", padding_mode="border", align_corners=False
        )
        return sampled.unflatten(2, (number, VIEW_PIXELS)).transpose(1, 2).reshape(batch, number, 3, *grid.shape[2:4])

    def numbers(self, arms: Tensor) -> Tensor:
        """Poses (..., 10) in metres to what a view does not show of them, (..., 6), about 1 in size."""
        along, across = _axes(arms)
        ahead, aside = arms[..., 3:6], arms[..., 6:9]
        height = arms[..., 2:3] + self.camera.tool_centre_m * ahead[..., 2:] - self.camera.object_height_m
        tilt = [(ahead[..., :2] * axis).sum(-1, keepdim=True) for axis in (along, across)]
        return torch.cat([10.0 * height, *tilt, ahead[..., 2:], aside[..., 2:], arms[..., 9:]], -1)

    def forward(self, conditioning: Tensor, anchor: Tensor) -> Tensor:
        """(batch, 4n, 20), n groups of four actions, and anchor (batch, 3, height, width) to (batch, n, 2 features)."""
        with torch.autocast(conditioning.device.type, enabled=False):  # as in `PoseMaps.spots`
            groups = self.arms(conditioning).unflatten(1, (-1, GROUP_FRAMES))
            batch, number = groups.shape[:2]
            hands = groups[:, :, -1].flatten(1, 2)  # (batch, 2n, 10): where each group ends
            views = self.views(hands, anchor).flatten(0, 1)
            numbers = self.numbers(groups).transpose(2, 3).flatten(3).flatten(0, 2)
        features: Tensor = self.combine(torch.cat([self.see(views), numbers], -1))
        return features.unflatten(0, (batch, number, 2)).flatten(2)


def _axes(hands: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors (..., 2) in the table's plane: along the line of the fingers, and a quarter turn to its left."""
    along = F.normalize(hands[..., 6:8], dim=-1, eps=1e-6)
    return along, torch.stack([-along[..., 1], along[..., 0]], -1)
