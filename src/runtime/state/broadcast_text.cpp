#include "runtime/state/broadcast_text.h"

#include <torch/types.h>

#include <cstring>
#include <optional>

#include "runtime/dist/message.h"
#include "runtime/state/load_problems.h"
#include "tessera/base/error.h"

namespace tessera::state {

std::string broadcast_text(const std::string& text, dist::Group& world, int root) {
  at::Tensor nbytes = torch::tensor({static_cast<std::int64_t>(text.size())}).to(world.device());
  world.broadcast(nbytes, root, "the length of a report").wait();
  at::Tensor bytes = torch::empty({nbytes.item<std::int64_t>()}, at::kByte);
  if (bytes.numel() == 0) return {};
  if (world.rank() == root) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  bytes = bytes.to(world.device());
  world.broadcast(bytes, root, "a report").wait();
  bytes = bytes.to(at::kCPU);
  return {static_cast<const char*>(bytes.data_ptr()), static_cast<std::size_t>(bytes.numel())};
}

void check_on_all_ranks(dist::Group& world, const std::function<void()>& check) {
  ErrorKind kind = ErrorKind::invalid_argument;
  std::optional<std::string> failure;
  try {
    check();
  } catch (const std::exception& error) {
    const auto* const ours = dynamic_cast<const Error*>(&error);
    if (ours != nullptr) kind = ours->kind();
    failure = dist::message_of(error);
  }
  const int before = world.size() - world.rank();  // larger than on all later ranks
  const int most = static_cast<int>(world.max(failure ? before : 0, "whether a rank refuses"));
  if (most == 0) return;
  const int first = world.size() - most;
  const std::string text = broadcast_text(
      std::to_string(static_cast<int>(kind)) + " " + failure.value_or(""), world, first);
  const std::size_t space = text.find(' ');
  rethrow_text(static_cast<ErrorKind>(std::stoi(text.substr(0, space))),
               (first == 0 ? "" : "rank " + std::to_string(first) + ": ") + text.substr(space + 1));
}

}  // namespace tessera::state
