#include "runtime/state/save_job.h"

#include <c10/util/Exception.h>

#include <optional>
#include <string>

namespace tessera::state {

void SaveJob::run(Rendezvous& rendezvous) {
  const int rank = rendezvous.rank();
  const std::string& path = save.path();
  std::optional<LiveSource> source;
  if (!save.options().base.empty()) {
    const auto texts = rendezvous.all_gather("comparing with the base of " + path, [&] {
      raise_failure();
      source.emplace(held_contents(*live, rank), std::move(held));
      return save.compare_with_base(*plan, *source);
    });
    hold_failure([&] { save.link_equal_pieces(texts); });
  }
  rendezvous.all_gather("writing " + path, [&] {
    raise_failure();
    if (!source) source.emplace(held_contents(*live, rank), std::move(held));
    save.write(*plan, *source);
    source.reset();
    return std::string();
  });
  const auto tokens = rendezvous.all_gather("writing the index of " + path, [&] {
    return rank == 0 ? std::to_string(save.join()) : std::string();
  });
  rendezvous.all_gather("marking as complete " + path, [&] {
    save.seal(std::stoull(tokens.front()));
    return std::string();
  });
  rendezvous.all_gather("finishing " + path, [&] {
    if (rank == 0) save.finish();
    return std::string();
  });
  for (const std::string& line : save.left_checkpoints()) TORCH_WARN(line);
}

}  // namespace tessera::state
