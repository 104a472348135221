"""An episode through dm_env_rpc's own client; it needs nothing of worldserve.

python -m worldserve.adapters.dm_env_rpc_bridge --target 127.0.0.1:50051 --bind 127.0.0.1:50070 \
    --initial-states adjust_bottle/train/0000 &
python -m examples.dm_env_rpc_client 127.0.0.1:50070
"""

import sys

import grpc
import numpy as np
from dm_env_rpc.v1 import connection, dm_env_adaptor, dm_env_rpc_pb2


def main(argv):
    with connection.Connection(grpc.insecure_channel(argv[0])) as channel:
        environment, world = dm_env_adaptor.create_and_join_world(channel, {}, {})
        timestep = environment.reset()
        print(timestep.observation["instruction"])
        shape = environment.action_spec()["action"].shape
        while not timestep.last():
            held = np.broadcast_to(timestep.observation["proprioception"], shape)
            timestep = environment.step({"action": held})
            print(f"{timestep.step_type.name} reward {timestep.reward:g} discount {timestep.discount:g}")
        channel.send(dm_env_rpc_pb2.LeaveWorldRequest())
        channel.send(dm_env_rpc_pb2.DestroyWorldRequest(world_name=world))


if __name__ == "__main__":
    main(sys.argv[1:])
