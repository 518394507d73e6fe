#include "formats/torch_zip/unwritten_file.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "formats/pickle/pickler.h"
#include "formats/pickle/plain_value.h"
#include "formats/pickle/unpickler.h"
#include "formats/torch_zip/torch_archive.h"
#include "formats/torch_zip/torch_zip_reader.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::torch_zip {
namespace {

/// A file that has a layout but is not written yet. Its storages read as zero.
class UnwrittenFile final : public ReadableFile {
 public:
  UnwrittenFile(const TorchSaveLayout& layout, std::string path)
      : path_(std::move(path)), nbytes_(layout.nbytes()) {
    const std::vector<std::uint32_t> no_crcs(layout.num_storages());
    segments_ = layout.segments_around_storages(no_crcs);
  }

  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return nbytes_; }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    TESSERA_CHECK(offset <= nbytes_ && out.size() <= nbytes_ - offset);
    std::ranges::fill(out, std::byte{0});
    const std::uint64_t end = offset + out.size();
    auto segment =
        std::ranges::upper_bound(segments_, offset, {}, &TorchSaveLayout::Segment::begin);
    if (segment != segments_.begin()) --segment;
    for (; segment != segments_.end() && segment->begin < end; ++segment) {
      const std::uint64_t from = std::max(offset, segment->begin);
      const std::uint64_t to = std::min(end, segment->begin + segment->bytes.size());
      if (from >= to) continue;
      const auto bytes = std::as_bytes(std::span(segment->bytes));
      std::ranges::copy(bytes.subspan(from - segment->begin, to - from),
                        out.subspan(from - offset).begin());
    }
  }

 private:
  std::string path_;
  std::uint64_t nbytes_;
  std::vector<TorchSaveLayout::Segment> segments_;
};

}  // namespace

void require_readable(const TorchSaveLayout& layout, const std::string& path,
                      const std::vector<std::string>& as_dict) {
  try {
    const auto reader = read_torch_zip(std::make_unique<UnwrittenFile>(layout, path), as_dict);
    for (std::size_t v = 0; v < reader->contents().values.size(); ++v) reader->read_value(v);
  } catch (const Error& error) {
    throw Error(
        ErrorKind::unsupported, {.path = path, .fqn = error.where().fqn},
        "a torch.save file with these contents could not be read: " + std::string(error.reason()));
  }
}

void require_readable(const Value& value) {
  pickle::Pickler pickler(2);
  pickle::pickle_value(pickler, value);
  const std::string bytes = std::move(pickler).finish();
  try {
    const pickle::ObjectGraph graph =
        pickle::unpickle({bytes.begin(), bytes.end()}, {}, saved_globals());
    pickle::WalkBudget budget(graph);
    pickle::to_value(graph.root(), budget);
  } catch (const Error& error) {
    throw Error(ErrorKind::unsupported, {},
                "a file with this value could not be read: " + std::string(error.reason()));
  }
}

}  // namespace tessera::formats::torch_zip
