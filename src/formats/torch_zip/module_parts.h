#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "formats/pickle/pickle_object.h"

namespace tessera::formats::torch_zip {

/// The parts of a pickled torch.nn.Module that can be read without its class: three dicts among its
/// attributes. The objects refer to the graph.
struct ModuleParts {
  pickle::Object parameters;
  pickle::Object buffers;
  pickle::Object modules;
  std::vector<std::string_view> transient_buffers;  // that its state_dict() leaves out
};

/// Returns the parts of a foreign object whose state is that of a module; nothing for any other
/// object. Cost: linear in its attributes.
std::optional<ModuleParts> module_parts(pickle::Object object);

}  // namespace tessera::formats::torch_zip
