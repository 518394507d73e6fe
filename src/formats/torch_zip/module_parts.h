#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "formats/pickle/pickle_object.h"

namespace tessera::formats::torch_zip {

/// The parts of a pickled torch.nn.Module that can be read without its class: three dicts among its
/// attributes. They are references into the parsed pickle, which must outlive them.
struct ModuleParts {
  pickle::Object parameters;
  pickle::Object buffers;
  pickle::Object modules;
  std::vector<std::string_view> transient_buffers;  // buffers that its state_dict() leaves out
};

/// Returns the parts of an object whose attributes are those of a torch.nn.Module; nothing for any
/// other object. Cost: linear in the number of attributes.
std::optional<ModuleParts> module_parts(pickle::Object object);

/// Returns whether an object is one of C++ that Python code holds (`torch.ScriptObject`), such as
/// packed weights.
bool is_script_object(pickle::Object object);

/// Returns whether a module's state_dict() returns weights or scales that are not among its
/// parameters and buffers, as in PyTorch's quantized modules: packed weights
/// (`torch.ScriptObject`), or a scale and a zero point that are Python numbers. Other modules can
/// make such entries too, but only their code tells. Requires: module_parts(module). Cost: linear
/// in the number of attributes.
bool has_packed_weights(pickle::Object module);

}  // namespace tessera::formats::torch_zip
