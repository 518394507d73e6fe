#include "runtime/state/broadcast_text.h"

#include <torch/types.h>

#include <cstring>

namespace tessera::state {

std::string broadcast_text(const std::string& text, dist::Group& world) {
  at::Tensor nbytes = torch::tensor({static_cast<std::int64_t>(text.size())}).to(world.device());
  world.broadcast(nbytes, 0, "the length of a report").wait();
  at::Tensor bytes = torch::empty({nbytes.item<std::int64_t>()}, at::kByte);
  if (bytes.numel() == 0) return {};
  if (world.rank() == 0) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  bytes = bytes.to(world.device());
  world.broadcast(bytes, 0, "a report").wait();
  bytes = bytes.to(at::kCPU);
  return {static_cast<const char*>(bytes.data_ptr()), static_cast<std::size_t>(bytes.numel())};
}

}  // namespace tessera::state
