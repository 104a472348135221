"""The bottle: a twelve-sided convex prism with neck and cap; its local x axis points from the bottom to the head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import sapien
from numpy.typing import NDArray
from sapien import physx

from services.sim_server.tabletop import rendering
from services.sim_server.tabletop.parameters import TABLE_TOP_Z_M, TAG_RIGHT, SceneParameters

SIDES = 12
APOTHEM_M = 0.028
BODY_LENGTH_M = 0.13
NECK_RADIUS_M, NECK_LENGTH_M = 0.012, 0.03
CAP_RADIUS_M, CAP_LENGTH_M = 0.014, 0.018
MASS_KG = 0.25
# The body frame's origin is the centre of the body; the bottom lies at -x, the head at +x.
BOTTOM_X_M = -0.5 * BODY_LENGTH_M
TOP_X_M = 0.5 * BODY_LENGTH_M + NECK_LENGTH_M + CAP_LENGTH_M


@dataclass(frozen=True)
class Colours:
    """Linear RGB of a bottle model's parts."""

    body: tuple[float, float, float]
    label: tuple[float, float, float]
    cap: tuple[float, float, float]


COLOURS = {
    13: Colours(body=(0.16, 0.045, 0.015), label=(0.55, 0.03, 0.02), cap=(0.80, 0.02, 0.02)),
    16: Colours(body=(0.03, 0.38, 0.08), label=(0.02, 0.22, 0.05), cap=(0.90, 0.90, 0.85)),
}


def prism(apothem_m: float, length_m: float, centre_x_m: float, sides: int = SIDES) -> NDArray[np.float32]:
    """Corners of a regular prism along x, float32 (2 sides, 3), with one face straight below (-z)."""
    angles = (np.arange(sides) + 0.5) * (2.0 * np.pi / sides)
    radius = apothem_m / math.cos(math.pi / sides)
    ring = np.column_stack([radius * np.sin(angles), -radius * np.cos(angles)])
    ends = [np.column_stack([np.full(sides, centre_x_m + sign * 0.5 * length_m), ring]) for sign in (-1.0, 1.0)]
    return np.vstack(ends).astype(np.float32)


def spawn_pose(parameters: SceneParameters) -> sapien.Pose:
    """Lying on the table, one face down, head toward the centre line turned by the scene's yaw; 0.5 mm above rest."""
    heading = parameters.yaw_rad + (math.pi if parameters.tag == TAG_RIGHT else 0.0)
    position = [parameters.x_m, parameters.y_m, TABLE_TOP_Z_M + APOTHEM_M + 0.0005]
    return sapien.Pose(position, [math.cos(0.5 * heading), 0.0, 0.0, math.sin(0.5 * heading)])


def build(scene: sapien.Scene, parameters: SceneParameters, render: bool) -> sapien.Entity:
    """Adds the bottle at its spawn pose."""
    body = physx.PhysxRigidDynamicComponent()
    material = physx.PhysxMaterial(0.6, 0.6, 0.0)
    neck_x = 0.5 * BODY_LENGTH_M + 0.5 * NECK_LENGTH_M
    cap_x = 0.5 * BODY_LENGTH_M + NECK_LENGTH_M + 0.5 * CAP_LENGTH_M
    for corners in (
        prism(APOTHEM_M, BODY_LENGTH_M, 0.0),
        prism(NECK_RADIUS_M, NECK_LENGTH_M, neck_x),
        prism(CAP_RADIUS_M, CAP_LENGTH_M, cap_x),
    ):
        body.attach(physx.PhysxCollisionShapeConvexMesh(corners, [1.0, 1.0, 1.0], material))
    across = MASS_KG * (3 * APOTHEM_M**2 + BODY_LENGTH_M**2) / 12.0
    body.mass = MASS_KG
    body.cmass_local_pose = sapien.Pose()
    body.inertia = np.array([0.5 * MASS_KG * APOTHEM_M**2, across, across], np.float32)
    body.set_angular_damping(2.0)
    entity = sapien.Entity()
    entity.name = "bottle"
    entity.add_component(body)
    if render:
        entity.add_component(_visual(COLOURS[parameters.bottle_model], neck_x, cap_x))
    entity.set_pose(spawn_pose(parameters))
    scene.add_entity(entity)
    return entity


def _visual(colours: Colours, neck_x_m: float, cap_x_m: float) -> sapien.render.RenderBodyComponent:
    visual = sapien.render.RenderBodyComponent()
    parts = (
        (APOTHEM_M, BODY_LENGTH_M, 0.0, colours.body),
        (APOTHEM_M + 0.0008, 0.35 * BODY_LENGTH_M, 0.0, colours.label),
        (NECK_RADIUS_M, NECK_LENGTH_M, neck_x_m, colours.body),
        (CAP_RADIUS_M, CAP_LENGTH_M, cap_x_m, colours.cap),
    )
    for radius, length, centre_x, colour in parts:
        shape = sapien.render.RenderShapeCylinder(radius, 0.5 * length, rendering.material(*colour))
        shape.local_pose = sapien.Pose([centre_x, 0.0, 0.0])
        visual.attach(shape)
    return visual
