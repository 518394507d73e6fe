#include "formats/torch_zip/module_parts.h"

#include "formats/pickle/foreign_object.h"
#include "formats/pickle/plain_value.h"

namespace tessera::formats::torch_zip {
namespace {

using pickle::Object;
using pickle::ObjectKind;
using pickle::ValueGlobal;

/// Whether an object is a dict or an OrderedDict. Up to torch 2.0, a module keeps its parameters,
/// buffers and submodules in OrderedDicts, since then in plain dicts.
bool is_dict(const std::optional<Object>& object) {
  if (!object) return false;
  return object->is(ObjectKind::dict) ||
         (is_dict_class(*object) && value_global(*object) == ValueGlobal::ordered_dict);
}

/// Returns the strings in a set. Before protocol 4, a pickled set is a call of `set` with a list.
std::vector<std::string_view> names_in(const std::optional<Object>& set) {
  std::vector<std::string_view> names;
  if (!set) return names;
  Object items = *set;
  if (items.is(ObjectKind::call) && value_global(items) == ValueGlobal::set) {
    const Object arguments = items.call_arguments("set");
    if (arguments.num_items("set") != 1) return names;
    items = arguments.item(0);
  }
  if (!items.is(ObjectKind::set) && !items.is(ObjectKind::list)) return names;
  for (std::size_t i = 0; i < items.num_items("set"); ++i) {
    if (items.item(i).is(ObjectKind::str)) names.push_back(items.item(i).as_text("buffer"));
  }
  return names;
}

/// Whether the class is one of PyTorch's quantized modules:
/// `torch.ao.nn.intrinsic.quantized.modules.linear_relu.LinearReLU`.
bool is_quantized_class(std::string_view name) {
  return (name.starts_with("torch.ao.nn.") || name.starts_with("torch.nn.")) &&
         name.find(".quantized.") != std::string_view::npos;
}

}  // namespace

std::optional<ModuleParts> module_parts(Object object) {
  if (!object.is(ObjectKind::call) || !pickle::is_foreign(object)) return std::nullopt;
  const std::optional<Object> state = object.call_state("module");
  if (!state || !state->is(ObjectKind::dict)) return std::nullopt;
  std::optional<Object> parameters;
  std::optional<Object> buffers;
  std::optional<Object> modules;
  std::optional<Object> transient;
  for (std::size_t i = 0; i < state->num_entries("module"); ++i) {
    if (!state->entry_key(i).is(ObjectKind::str)) continue;
    const std::string_view name = state->entry_key(i).as_text("attribute");
    if (name == "_parameters") parameters = state->entry_value(i);
    if (name == "_buffers") buffers = state->entry_value(i);
    if (name == "_modules") modules = state->entry_value(i);
    if (name == "_non_persistent_buffers_set") transient = state->entry_value(i);
  }
  if (!is_dict(parameters) || !is_dict(buffers) || !is_dict(modules)) return std::nullopt;
  return ModuleParts{*parameters, *buffers, *modules, names_in(transient)};
}

bool is_script_object(Object object) {
  return pickle::is_foreign(object) && pickle::foreign_name(object) == "torch.ScriptObject";
}

bool has_packed_weights(Object module) {
  const bool is_quantized = is_quantized_class(pickle::foreign_name(module));
  const Object state = *module.call_state("module");
  for (std::size_t i = 0; i < state.num_entries("module"); ++i) {
    const Object key = state.entry_key(i);
    if (!key.is(ObjectKind::str)) continue;
    const std::string_view name = key.as_text("attribute");
    // A class that a program derives from a quantized one keeps this attribute.
    const bool may_be_packed = is_quantized || name == "_packed_params";
    if (may_be_packed && is_script_object(state.entry_value(i))) return true;
    if (is_quantized && (name == "scale" || name == "zero_point")) return true;
  }
  return false;
}

}  // namespace tessera::formats::torch_zip
