#pragma once

#include "tessera/base/error.h"

namespace tessera::detail {

/// Whether an error says nothing about the checkpoint that was read: the operating system or a
/// server failed, or the user asked to stop. Code that takes errors for properties of a checkpoint
/// (it is damaged, it is another format) throws such an error again.
inline bool is_outside_failure(const Error& error) {
  return error.kind() == ErrorKind::io || error.kind() == ErrorKind::interrupted;
}

}  // namespace tessera::detail
