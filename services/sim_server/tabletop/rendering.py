"""The renderer's process-wide state: shader directory, picture format, one render system kept alive."""

from __future__ import annotations

import os
from pathlib import Path

# One software-rendering thread a process: several worker processes share the cores. Mesa reads it at first use.
os.environ.setdefault("LP_NUM_THREADS", "0")

import sapien
from sapien import render

from services.sim_server.tabletop.parameters import CameraSettings

SHADER_DIRECTORY = Path(__file__).parent / "shaders"
_kept_alive: list[render.RenderSystem] = []


def ensure_renderer() -> None:
    """Starts the renderer once a process; later calls do nothing.

    The first `RenderSystem` stays referenced for the life of the process: SAPIEN drops its caches when the last one
    goes. Never fork a process that has called this; spawn.
    """
    if _kept_alive:
        return
    render.set_picture_format("Color", "r8g8b8a8unorm")
    render.set_camera_shader_dir(str(SHADER_DIRECTORY))
    render.set_msaa(4)
    _kept_alive.append(render.RenderSystem())


def add_camera(scene: sapien.Scene, settings: CameraSettings) -> render.RenderCameraComponent:
    """A fixed camera in `scene`, with `settings.height_px` x `settings.width_px` pictures."""
    camera = render.RenderCameraComponent(settings.width_px, settings.height_px, str(SHADER_DIRECTORY))
    camera.set_fovy(settings.vertical_field_of_view_rad, compute_x=True)
    camera.near, camera.far = 0.05, 10.0
    entity = sapien.Entity()
    entity.add_component(camera)
    matrix = [[0.0] * 4 for _ in range(4)]
    axes = settings.axes()
    for row in range(3):
        matrix[row] = [*axes[row].tolist(), settings.eye_m[row]]
    matrix[3] = [0.0, 0.0, 0.0, 1.0]
    entity.set_pose(sapien.Pose(matrix))
    scene.add_entity(entity)
    return camera


def material(red: float, green: float, blue: float) -> render.RenderMaterial:
    """A matte colour, linear RGB in [0, 1]."""
    return render.RenderMaterial(base_color=[red, green, blue, 1.0])
