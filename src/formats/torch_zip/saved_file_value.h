#pragma once

#include <string>
#include <string_view>

#include "tessera/base/value.h"

// An object of which only the file of torch.save is kept: the value ("torch.save", <its bytes>), a
// tuple, because readers open dicts.
namespace tessera::formats::torch_zip {

Value saved_file_value(std::string bytes);

/// Returns the bytes if `value` is as saved_file_value makes it, and the file has nothing but
/// tensors and plain values, so that loading it runs no other code. Otherwise returns an empty
/// text. `path`: of the checkpoint that is written; it names the bytes while they are checked.
std::string_view saved_file_in(const Value& value, const std::string& path);

}  // namespace tessera::formats::torch_zip
