#pragma once

#include <random>
#include <string>

namespace tessera::detail {

/// Returns digits that no other call returns, on any machine: 128 random bits.
inline std::string random_name() {
  std::random_device random;
  std::string name;
  for (int i = 0; i < 4; ++i) name += std::to_string(random());
  return name;
}

}  // namespace tessera::detail
