#include "formats/torch_zip/object_parts.h"

namespace tessera::formats::torch_zip {

using pickle::Object;
using pickle::ObjectKind;

std::optional<Object> item_of(const std::optional<Object>& object, std::size_t index) {
  if (!object || (!object->is(ObjectKind::tuple) && !object->is(ObjectKind::list)) ||
      index >= object->num_items("items")) {
    return std::nullopt;
  }
  return object->item(index);
}

std::optional<Object> attribute_of(std::optional<Object> object, std::string_view name) {
  if (object && object->is(ObjectKind::call)) object = object->call_state("state");
  // The pickled state of an object with __slots__ is (None, attributes), or (dict, attributes) if
  // it has a __dict__ too.
  if (object && object->is(ObjectKind::tuple) && object->num_items("state") == 2) {
    object = object->item(1);
  }
  return object && object->is(ObjectKind::dict) ? object->find(name) : std::nullopt;
}

}  // namespace tessera::formats::torch_zip
