# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Import a model, describe a machine
#
# egx reads ONNX files. This page makes a small one itself; for your own, put its path into
# `egx.load("model.onnx", dims={"batch": 1})`, or run `egx optimize model.onnx --dim batch=1`.

# %%
import os

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import egx
from egx import report

BUDGET = int(os.environ.get("EGX_NOTEBOOK_BUDGET", "4000"))

# %% [markdown]
# ## A file
#
# A small image classifier: a stem, three stages of two residual blocks, a pool and a classifier.
# The batch is a free dimension, as exporters like to leave it.

# %%
rng = np.random.default_rng(0)
nodes, weights = [], []


def constant(name, *shape):
    """A weight of the file."""
    array = rng.normal(0, 0.05, shape).astype(np.float32)
    weights.append(numpy_helper.from_array(array, name))
    return name


def node(op_type, inputs, output, **attributes):
    """A node of the file; returns its output."""
    nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
    return output


def conv(x, name, channels_in, channels, kernel=3, stride=1, relu=True):
    """Convolution, batch normalisation and perhaps a ReLU."""
    pad = kernel // 2
    x = node(
        "Conv",
        [x, constant(f"{name}.w", channels, channels_in, kernel, kernel)],
        f"{name}.conv",
        kernel_shape=[kernel, kernel],
        strides=[stride, stride],
        pads=[pad, pad, pad, pad],
    )
    norm = [constant(f"{name}.{part}", channels) for part in ("scale", "bias", "mean", "var")]
    x = node("BatchNormalization", [x, *norm], f"{name}.bn")
    return node("Relu", [x], f"{name}.relu") if relu else x


x, width = conv("image", "stem", 3, 32, stride=2), 32
for stage, channels in enumerate((64, 128, 256)):
    for block in range(2):
        name, stride = f"stage{stage}.{block}", 2 if block == 0 else 1
        y = conv(x, f"{name}.a", width, channels, stride=stride)
        y = conv(y, f"{name}.b", channels, channels, relu=False)
        if block == 0:
            x = conv(x, f"{name}.skip", width, channels, kernel=1, stride=stride, relu=False)
        x, width = node("Add", [x, y], f"{name}.add"), channels
        x = node("Relu", [x], f"{name}.out")
x = node("GlobalAveragePool", [x], "pool")
x = node("Flatten", [x], "flatten")
node("Gemm", [x, constant("fc.w", 1000, width), constant("fc.b", 1000)], "logits", transB=1)

image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 128, 128])
logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1000])
graph = helper.make_graph(nodes, "small_resnet", [image], [logits], weights)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), "small.onnx")
print(f"{len(nodes)} nodes, {os.path.getsize('small.onnx') / 2**20:.1f} MiB")

# %% [markdown]
# ## Two granularities
#
# A free dimension needs a size; the error says which ones there are.

# %%
try:
    egx.load("small.onnx")
except egx.errors.EgxError as error:
    print(error)

# %% [markdown]
# `"op"` keeps every node. `"layer"` fuses normalisation, activation and the residual addition into
# the convolution before them, as compilers do; it is the default.

# %%
ops = egx.load("small.onnx", dims={"batch": 1}, granularity="op")
model = egx.load("small.onnx", dims={"batch": 1})
print(ops)
print(model)
report.model_table(model)

# %%
for name, kind in list(zip(model.op_names, model.op_types, strict=True))[:8]:
    print(f"{name:24} {kind}")

# %% [markdown]
# ## A machine
#
# A machine is a TOML file with units. Here a small NPU with half a MiB of SRAM beside a narrow
# DRAM. Mistakes are reported with the field and what was expected.

# %%
TEXT = """
name = "my-npu"

[[device]]
name = "npu"
launch = "2 us"

[[device.level]]
name = "DRAM"
capacity = "2 GiB"
bandwidth = "12.8 GB/s"

[[device.level]]
name = "shared SRAM"
capacity = "4 MiB"
bandwidth = "60 GB/s"

[[device.level]]
name = "local SRAM"
capacity = "512 KiB"
bandwidth = "400 GB/s"

[device.rates]
contraction = { rate = "1 TFLOPS", efficiency = 0.7 }
other = { rate = "64 GFLOPS" }
"""
with open("my-npu.toml", "w") as file:
    file.write(TEXT)
with open("wrong.toml", "w") as file:
    file.write(TEXT.replace('"512 KiB"', '"512 KiBs"'))

try:
    egx.hardware.load("wrong.toml")
except egx.errors.EgxError as error:
    print(error)

# %%
machine = egx.hardware.load("my-npu.toml")
report.hardware_table(machine)

# %% [markdown]
# ## Search and prove

# %%
problem = egx.MemoryPlacement(model, machine)
result = egx.optimize(problem, "egrl_plus", budget=BUDGET, seed=0)
solution = egx.exact(problem, time_limit_s=min(20.0, BUDGET / 100))  # less for quick runs
verdict = report.judge(problem, result, solution)
verdict.table()

# %% [markdown]
# On this machine memory decides: the float32 weights of the last stage alone exceed both SRAMs, so
# the question is what to leave outside. Native takes what comes first.

# %%
report.level_strips(problem, result.reference, verdict.best.decisions, names=("native", "best"))

# %%
report.occupancy_over_steps(
    problem, result.reference, verdict.best.decisions, names=("native", "best")
)

# %% [markdown]
# ## A model without a file
#
# `GraphBuilder` takes ops one by one, with their bytes and FLOPs: for formats that egx does not
# read, and for what-if questions.

# %%
builder = egx.GraphBuilder("mlp")
hidden = []
for layer in range(6):
    hidden = builder.op(
        f"dense{layer}",
        kind="contraction",
        op_type="matmul",
        inputs=hidden,
        output_bytes=[64 * 512],
        flops=2 * 64 * 512 * 512,
        weight_bytes=512 * 512,
    )
builder.output(hidden[0])
mlp = builder.build_model()
print(egx.optimize(egx.MemoryPlacement(mlp, machine), "exact"))
