#pragma once

#include <torch/optim/optimizer.h>

namespace tessera {

/// Does what `optimizer.step()` does, but with the fused kernels that Python's torch.optim uses
/// with `fused=True`: one pass over each parameter instead of some ten, and on a GPU a few launches
/// for all parameters. The results are those of `step()` up to rounding: in float16 and bfloat16
/// the kernels round less often.
///
/// Reads and writes the same state as `step()`, with each group's options. So calls of both may
/// alternate, and `optim_state_dict`, `TrainState` and torch::save work as before. Parameters may
/// be those of fully sharded and replicated modules. Does not wait for the device. Not collective.
///
/// The optimizer's own step updates parameters for which there is no fused kernel:
/// - on a device other than CPU and CUDA; with Adagrad, other than the CPU;
/// - of a dtype other than float32, float64, float16, bfloat16; with SGD on the CPU, other than the
///   first two (PyTorch's kernel leaves elements of the others as they are);
/// - with gaps in memory, or whose gradient or state has another dtype, shape or order in memory.
///
/// Optimizers: SGD, Adam, AdamW, Adagrad of torch::optim, not classes derived from them.
/// Throws: Error(unsupported) naming an optimizer of another class; Error(invalid_argument) if the
/// optimizer holds a parameter twice; what `step()` throws, such as for a sparse gradient of Adam.
/// Parameters with a fused kernel are unchanged then.
///
/// Source: torch/optim/adam.py, sgd.py, adagrad.py of PyTorch 2.11; ATen's `_fused_adamw_`, ….
void fused_step(torch::optim::Optimizer& optimizer);

}  // namespace tessera
