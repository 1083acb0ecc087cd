"""Convert a float32 ONNX model to bfloat16, where ONNX Runtime has GPU kernels for it."""

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

OPSET = 22  # the first with bfloat16 in Conv
# Operations of classifiers that ONNX Runtime's CUDA provider supports in bfloat16. It has no
# BatchNormalization or Clip in bfloat16; and averages and norms are more accurate in float32.
OPS = {"Conv", "Gemm", "MatMul", "Add", "Mul", "Max", "Relu"}
OPS |= {"Sigmoid", "HardSigmoid", "HardSwish"}
# These only move data of any dtype:
OPS |= {"Concat", "Expand", "Flatten", "Gather", "Reshape", "Split", "Squeeze", "Transpose"}
OPS |= {"Unsqueeze"}


def to_bfloat16(model: onnx.ModelProto) -> None:
    """Change the model in place: :data:`OPS` compute in bfloat16, all other nodes in float32.

    Weights are stored in the type of the nodes that use them, and an activation goes through a Cast
    where the next node is of the other type. Inputs and outputs of the model keep their types.
    """
    replace_max_pools(model)
    graph = model.graph
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = [*inferred.value_info, *inferred.output]
    floats = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    weights = {t.name: t for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    nodes, converted = [], {}  # by the name of a float32 value, that of the same in bfloat16

    def cast(name: str, result: str, to: int) -> None:
        nodes.append(helper.make_node("Cast", [name], [result], f"cast_to_{result}", to=to))

    def in_bfloat16(name: str) -> str:
        if name not in converted:
            converted[name] = f"{name}_bfloat16"
            if name in weights:
                dtype = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
                array = numpy_helper.to_array(weights[name]).astype(dtype)
                graph.initializer.append(numpy_helper.from_array(array, converted[name]))
            else:
                cast(name, converted[name], TensorProto.BFLOAT16)
        return converted[name]

    for node in graph.node:
        if node.op_type not in OPS:
            nodes.append(node)
            continue
        for i, name in enumerate(node.input):
            if name in floats or name in weights:
                node.input[i] = in_bfloat16(name)
        nodes.append(node)
        for i, name in enumerate(node.output):
            if name in floats:
                node.output[i] = converted[name] = f"{name}_bfloat16"
                cast(converted[name], name, TensorProto.FLOAT)  # for nodes that need float32
    del graph.value_info[:]  # it declares float32 everywhere
    keep_what_is_used(graph, nodes)


def keep_what_is_used(graph: onnx.GraphProto, nodes: list[NodeProto]) -> None:
    """Set the nodes of the graph, without unused nodes and weights."""
    used, kept = {value.name for value in graph.output}, []
    for node in reversed(nodes):
        if used.intersection(node.output):
            used.update(node.input)
            kept.append(node)
    weights = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(weights)


def replace_max_pools(model: onnx.ModelProto) -> None:
    """Replace each MaxPool by Max and Gather: ONNX Runtime 1.31's CUDA provider supports MaxPool
    only up to opset 21, in any dtype."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = [*inferred.input, *inferred.value_info, *inferred.output]
    sides = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim][2:] for v in values}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "MaxPool":
            nodes += max_pool(node, sides[node.input[0]], sides[node.output[0]], model.graph)
        else:
            nodes.append(node)
    keep_what_is_used(model.graph, nodes)


def max_pool(
    node: NodeProto, sides: list[int], pooled_sides: list[int], graph: onnx.GraphProto
) -> list[NodeProto]:
    """The nodes that take the maximum over the rows of each window, and then over its columns.

    The first rows of all windows are gathered into one tensor, the second rows into another, and so
    on; the result is their ``Max``. Positions beyond the edge are replaced by the edge, which is in
    the same window, so the result is the same.
    """
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    kernel = attributes["kernel_shape"]
    strides, pads = attributes.get("strides", [1, 1]), attributes.get("pads", [0] * 4)
    [name], [result], nodes = node.input, node.output, []
    for axis, final in ((0, f"{result}_of_rows"), (1, result)):
        gathered = [f"{result}_axis{axis}_{i}" for i in range(kernel[axis])]
        for i, part in enumerate(gathered):
            places = np.arange(pooled_sides[axis]) * strides[axis] + i - pads[axis]
            places = places.clip(0, sides[axis] - 1)
            graph.initializer.append(numpy_helper.from_array(places, f"{part}_places"))
            nodes.append(
                helper.make_node("Gather", [name, f"{part}_places"], [part], part, axis=2 + axis)
            )
        nodes.append(helper.make_node("Max", gathered, [final], final))
        name = final
    return nodes
