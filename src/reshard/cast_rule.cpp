#include "reshard/cast_rule.h"

#include "reshard/state_key.h"

namespace tessera::reshard {

bool is_never_cast(const TensorMeta& meta) {
  return meta.shape.empty() || before_component(meta.fqn, "param_groups").has_value();
}

}  // namespace tessera::reshard
