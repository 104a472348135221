"""`tabletop`: RoboTwin's adjust_bottle on plain SAPIEN 3, in process. See the README beside this file."""

from services.sim_server.tabletop.expert import plan_expert
from services.sim_server.tabletop.parameters import CameraSettings, SceneParameters
from services.sim_server.tabletop.robot import DriveSettings, home, joint_limits
from services.sim_server.tabletop.scene import ChunkOutcome, TabletopScene

__all__ = [
    "CameraSettings",
    "ChunkOutcome",
    "DriveSettings",
    "SceneParameters",
    "TabletopScene",
    "home",
    "joint_limits",
    "plan_expert",
]
