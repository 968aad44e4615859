"""``train_tensor_parallel`` whose stages each name their layers from 0 on, as slices of a Sequential do."""

import gpt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

build_stage = gpt.build_stage


def build_anonymous_stage(stage_index: int, num_stages: int, config: gpt.Config) -> nn.Module:
    return nn.Sequential(*build_stage(stage_index, num_stages, config).children())


def main() -> None:
    gpt.build_stage = build_anonymous_stage
    import train_tensor_parallel

    divide = train_tensor_parallel.divide

    def divide_blocks(stage: nn.Module, mesh: DeviceMesh) -> None:
        blocks = nn.Module()
        for name, layer in stage.named_children():
            if isinstance(layer, gpt.Block):
                blocks.add_module(f"block{name}", layer)
        divide(blocks, mesh)

    train_tensor_parallel.divide = divide_blocks
    train_tensor_parallel.main()


if __name__ == "__main__":
    main()
