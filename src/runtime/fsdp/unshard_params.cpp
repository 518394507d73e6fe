#include "tessera/runtime/fsdp/unshard_params.h"

#include <torch/types.h>

#include <algorithm>
#include <exception>

#include "runtime/fsdp/flat_param_handle.h"
#include "runtime/fsdp/pass.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using fsdp::FlatParamHandle;
using Handles = std::vector<std::shared_ptr<FlatParamHandle>>;

Handles handles_of(const torch::nn::Module& module, bool recurse) {
  if (!recurse) {
    const auto own = registry::find<fsdp::ShardedModule>(module);
    if (!own) {
      throw Error::expected(ErrorKind::invalid_argument, {}, "unshard_params of " + module.name(),
                            "a fully sharded module, or the option recurse",
                            "a module that fully_shard was not applied to");
    }
    return own->handles;
  }
  Handles handles;
  for (const at::Tensor& parameter : module.parameters()) {
    auto handle = FlatParamHandle::of(parameter);
    if (handle && std::ranges::find(handles, handle) == handles.end()) {
      handles.push_back(std::move(handle));
    }
  }
  return handles;
}

}  // namespace

UnshardedParams::UnshardedParams(torch::nn::Module& module, const UnshardParamsOptions& options)
    : handles_(handles_of(module, options.recurse)), num_uncaught_(std::uncaught_exceptions()) {
  const fsdp::UntouchedScope untouched;
  try {
    for (; num_entered_ < handles_.size(); ++num_entered_) {
      handles_[num_entered_]->show_whole(options);
    }
  } catch (...) {
    try {
      leave_all();
    } catch (const std::exception&) {
      // Ignored: the first error is thrown below.
    }
    throw;
  }
}

UnshardedParams::~UnshardedParams() noexcept(false) {
  try {
    leave_all();
  } catch (const std::exception&) {
    if (std::uncaught_exceptions() == num_uncaught_) throw;
  }
}

/// Ends the scope for every unit, even if one unit fails, because other ranks wait for this rank's
/// messages about the remaining units. Throws the first error at the end.
void UnshardedParams::leave_all() {
  const fsdp::UntouchedScope untouched;
  std::exception_ptr first;
  for (std::size_t i = 0; i < num_entered_; ++i) {
    try {
      handles_[i]->hide_whole();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  num_entered_ = 0;
  if (first) std::rethrow_exception(first);
}

}  // namespace tessera
