"""How much of the bottle and of the gripper a camera's frame contains, by projection (occlusion is not counted)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sapien import physx

from services.sim_server.tabletop import bottle
from services.sim_server.tabletop.parameters import CameraSettings
from services.sim_server.tabletop.scene import TabletopScene


def in_frame_fractions(scene: TabletopScene, camera: CameraSettings | None = None) -> tuple[float, float]:
    """Fractions in [0, 1] of the bottle's and of the active gripper's sample points inside the frame."""
    settings = camera or scene.camera_settings
    position, rotation = scene.bottle_pose()
    on_bottle = position + _bottle_points() @ rotation.T
    return _inside(settings, on_bottle), _inside(settings, _gripper_points(scene))


def _bottle_points() -> NDArray[np.float64]:
    """Points on the bottle's surface, evenly along its axis, in its own frame."""
    along = np.linspace(bottle.BOTTOM_X_M, bottle.TOP_X_M, 40)
    radius = np.where(along <= 0.5 * bottle.BODY_LENGTH_M, bottle.APOTHEM_M, bottle.CAP_RADIUS_M)
    angles = np.linspace(0.0, 2.0 * np.pi, 16, endpoint=False)
    rings = [
        np.column_stack([np.full(16, x), r * np.cos(angles), r * np.sin(angles)])
        for x, r in zip(along, radius, strict=True)
    ]
    return np.vstack(rings)


def _gripper_points(scene: TabletopScene) -> NDArray[np.float64]:
    """A grid over the boxes of the hand and of both fingers, in the world."""
    grid = np.stack(np.meshgrid(*[np.linspace(-1.0, 1.0, 5)] * 3), axis=-1).reshape(-1, 3)
    points = []
    for link in scene.robot.articulations[scene.parameters.arm].links:
        if "finger" not in link.name and not link.name.endswith("link_6"):
            continue
        pose = np.asarray(link.entity_pose.to_transformation_matrix(), np.float64)
        for shape in link.collision_shapes:
            if isinstance(shape, physx.PhysxCollisionShapeBox):
                local = np.asarray(shape.local_pose.p, np.float64) + grid * np.asarray(shape.half_size, np.float64)
                points.append(local @ pose[:3, :3].T + pose[:3, 3])
    return np.vstack(points)


def _inside(camera: CameraSettings, points_m: NDArray[np.float64]) -> float:
    pixels = camera.project(points_m)
    inside = (pixels >= 0.0).all(axis=1) & (pixels[:, 0] < camera.width_px) & (pixels[:, 1] < camera.height_px)
    return float(inside.mean())
