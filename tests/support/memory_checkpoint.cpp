#include "support/memory_checkpoint.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace tessera::test {
namespace {

// Calls visit(begin, numel) for each contiguous row of the region, in the region's own order.
// `begin`: the row's first element in the whole tensor.
template <class Visit>
void for_each_row(std::span<const std::int64_t> shape, const Region& region, Visit visit) {
  if (const auto* range = std::get_if<FlatRange>(&region)) {
    visit(range->begin, range->end - range->begin);
    return;
  }
  const Box& box = std::get<Box>(region);
  if (std::find(box.sizes.begin(), box.sizes.end(), 0) != box.sizes.end()) return;
  const std::size_t num_outer = shape.empty() ? 0 : shape.size() - 1;
  std::vector<std::int64_t> index(shape.size(), 0);
  for (;;) {
    std::int64_t whole_index = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      whole_index = whole_index * shape[d] + box.offsets[d] + index[d];
    }
    visit(whole_index, shape.empty() ? 1 : box.sizes.back());
    std::size_t d = num_outer;
    while (d > 0 && ++index[d - 1] == box.sizes[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

std::int64_t region_numel(const Region& region) {
  return std::visit([](const auto& r) { return r.numel(); }, region);
}

std::vector<std::vector<Bytes>> empty_pieces(const formats::CheckpointContents& contents) {
  std::vector<std::vector<Bytes>> bytes;
  for (const auto& tensor : contents.tensors) {
    auto& pieces = bytes.emplace_back();
    for (const auto& piece : tensor.pieces) {
      pieces.emplace_back(static_cast<std::size_t>(region_numel(piece.region)) *
                          itemsize(tensor.meta.dtype));
    }
  }
  return bytes;
}

void require(bool holds, const char* rule) {
  if (!holds) throw std::logic_error(std::string("MemoryWriter: ") + rule);
}

}  // namespace

Bytes gather_region(std::span<const std::byte> whole, std::span<const std::int64_t> shape,
                    const Region& region, std::uint64_t itemsize) {
  Bytes out;
  for_each_row(shape, region, [&](std::int64_t index, std::int64_t numel) {
    const auto row = whole.subspan(static_cast<std::size_t>(index) * itemsize,
                                   static_cast<std::size_t>(numel) * itemsize);
    out.insert(out.end(), row.begin(), row.end());
  });
  return out;
}

void scatter_region(std::span<const std::byte> region_bytes, std::span<const std::int64_t> shape,
                    const Region& region, std::uint64_t itemsize, std::span<std::byte> whole) {
  std::size_t from = 0;
  for_each_row(shape, region, [&](std::int64_t index, std::int64_t numel) {
    const auto row = region_bytes.subspan(from, static_cast<std::size_t>(numel) * itemsize);
    if (!row.empty()) {
      std::memcpy(whole.data() + static_cast<std::size_t>(index) * itemsize, row.data(),
                  row.size());
    }
    from += row.size();
  });
}

Bytes whole_tensor(const formats::CheckpointReader& reader, std::size_t tensor_index) {
  const auto& tensor = reader.contents().tensors.at(tensor_index);
  const std::uint64_t size = itemsize(tensor.meta.dtype);
  Bytes whole(tensor.meta.nbytes());
  for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
    const Region& region = tensor.pieces[p].region;
    const std::int64_t numel = region_numel(region);
    Bytes bytes(static_cast<std::size_t>(numel) * size);
    reader.read_piece(tensor_index, p, {0, numel}, bytes);
    scatter_region(bytes, tensor.meta.shape, region, size, whole);
  }
  return whole;
}

MemoryCheckpoint::MemoryCheckpoint(std::string path, int world_size) : path_(std::move(path)) {
  contents_.world_size = world_size;
}

MemoryCheckpoint::MemoryCheckpoint(std::string path, formats::CheckpointContents contents,
                                   std::vector<std::vector<Bytes>> piece_bytes,
                                   std::vector<Value> values)
    : path_(std::move(path)),
      contents_(std::move(contents)),
      piece_bytes_(std::move(piece_bytes)),
      values_(std::move(values)) {}

formats::TensorEntry& MemoryCheckpoint::add(TensorMeta meta, const Bytes& whole,
                                            std::vector<formats::Piece> pieces) {
  if (whole.size() != meta.nbytes()) throw std::logic_error(meta.fqn + ": wrong number of bytes");
  if (pieces.empty()) {
    pieces.push_back({Box{Shape(meta.shape.size(), 0), meta.shape}, 0});
  }
  std::vector<Bytes> bytes;
  for (const auto& piece : pieces) {
    bytes.push_back(gather_region(whole, meta.shape, piece.region, itemsize(meta.dtype)));
  }
  const auto at = std::lower_bound(contents_.tensors.begin(), contents_.tensors.end(), meta.fqn,
                                   [](const formats::TensorEntry& entry, const std::string& fqn) {
                                     return entry.meta.fqn < fqn;
                                   });
  piece_bytes_.insert(piece_bytes_.begin() + (at - contents_.tensors.begin()), std::move(bytes));
  formats::TensorEntry entry;
  entry.meta = std::move(meta);
  entry.pieces = std::move(pieces);
  return *contents_.tensors.insert(at, std::move(entry));
}

formats::ValueEntry& MemoryCheckpoint::add_value(std::string name, Value value) {
  const auto at = std::lower_bound(
      contents_.values.begin(), contents_.values.end(), name,
      [](const formats::ValueEntry& entry, const std::string& key) { return entry.name < key; });
  values_.insert(values_.begin() + (at - contents_.values.begin()), std::move(value));
  formats::ValueEntry entry;
  entry.name = std::move(name);
  return *contents_.values.insert(at, std::move(entry));
}

void MemoryCheckpoint::add_alias(std::string fqn, std::string target) {
  const auto at = std::lower_bound(
      contents_.aliases.begin(), contents_.aliases.end(), fqn,
      [](const formats::Alias& alias, const std::string& key) { return alias.fqn < key; });
  contents_.aliases.insert(at, formats::Alias{std::move(fqn), std::move(target), {}});
}

std::size_t MemoryCheckpoint::index_of(std::string_view fqn) const {
  for (std::size_t t = 0; t < contents_.tensors.size(); ++t) {
    if (contents_.tensors[t].meta.fqn == fqn) return t;
  }
  throw std::logic_error("no tensor " + std::string(fqn));
}

Bytes& MemoryCheckpoint::piece_bytes(std::string_view fqn, std::size_t piece_index) {
  return piece_bytes_.at(index_of(fqn)).at(piece_index);
}

void MemoryCheckpoint::fail_reads_of(std::string_view fqn, std::size_t piece_index) {
  failing_.emplace(std::string(fqn), piece_index);
}

void MemoryCheckpoint::read_piece(std::size_t tensor_index, std::size_t piece_index,
                                  FlatRange range, std::span<std::byte> out) const {
  const auto& tensor = contents_.tensors.at(tensor_index);
  const Bytes& bytes = piece_bytes_.at(tensor_index).at(piece_index);
  const std::uint64_t size = itemsize(tensor.meta.dtype);
  if (range.begin < 0 || range.end < range.begin ||
      static_cast<std::uint64_t>(range.end) * size > bytes.size() ||
      out.size() != static_cast<std::uint64_t>(range.numel()) * size) {
    throw std::logic_error(tensor.meta.fqn + ": read outside of the piece");
  }
  if (failing_.contains({tensor.meta.fqn, piece_index})) {
    throw Error::expected(ErrorKind::corruption, {path_, tensor.meta.fqn, {}}, "checksum", "0x0",
                          "0x1");
  }
  if (!out.empty()) {
    std::memcpy(out.data(), bytes.data() + static_cast<std::uint64_t>(range.begin) * size,
                out.size());
  }
}

Value MemoryCheckpoint::read_value(std::size_t value_index) const {
  return values_.at(value_index);
}

formats::PieceStorage MemoryCheckpoint::piece_storage(std::size_t tensor_index,
                                                      std::size_t piece_index) const {
  formats::PieceStorage storage;
  const int rank = contents_.tensors.at(tensor_index).pieces.at(piece_index).rank;
  storage.file = "rank-" + std::to_string(rank);
  storage.encoding = "plain";
  storage.stored_nbytes = piece_bytes_.at(tensor_index).at(piece_index).size();
  return storage;
}

void MemoryCheckpoint::verify(const formats::FindingSink& sink,
                              const formats::ProgressSink& progress, int /*num_threads*/) const {
  for (std::size_t t = 0; t < contents_.tensors.size(); ++t) {
    for (std::size_t p = 0; p < piece_bytes_[t].size(); ++p) {
      if (failing_.contains({contents_.tensors[t].meta.fqn, p})) {
        formats::Finding finding;
        finding.rule = "checksum";
        finding.where = {path_, contents_.tensors[t].meta.fqn, {}};
        finding.expected = "0x0";
        finding.found = "0x1";
        sink(finding);
      }
      if (progress) progress(piece_bytes_[t][p].size());
    }
  }
}

MemoryWriter::MemoryWriter(formats::CheckpointContents contents, std::vector<Value> values,
                           std::uint64_t block_nbytes)
    : contents_(std::move(contents)),
      values_(std::move(values)),
      block_nbytes_(block_nbytes),
      piece_bytes_(empty_pieces(contents_)) {
  for (int rank = 0; rank < contents_.world_size; ++rank) {
    for (std::size_t t = 0; t < contents_.tensors.size(); ++t) {
      for (std::size_t p = 0; p < contents_.tensors[t].pieces.size(); ++p) {
        const auto& piece = contents_.tensors[t].pieces[p];
        if (piece.rank != rank || region_numel(piece.region) == 0) continue;
        place_in_order_[{t, p}] = order_.size();
        order_.push_back({t, p});
        const std::int64_t block = block_numel({t, p});
        num_blocks_expected_ +=
            static_cast<std::size_t>((region_numel(piece.region) + block - 1) / block);
      }
    }
  }
}

std::span<const formats::CheckpointWriter::PieceId> MemoryWriter::write_order() const {
  return order_;
}

std::int64_t MemoryWriter::block_numel(PieceId piece) const {
  const auto dtype = contents_.tensors.at(piece.tensor_index).meta.dtype;
  return static_cast<std::int64_t>(std::max<std::uint64_t>(1, block_nbytes_ / itemsize(dtype)));
}

void MemoryWriter::write_block(PieceId piece, std::int64_t begin,
                               std::span<const std::byte> bytes) {
  const auto& tensor = contents_.tensors.at(piece.tensor_index);
  const std::int64_t numel = region_numel(tensor.pieces.at(piece.piece_index).region);
  const std::int64_t block = block_numel(piece);
  const std::uint64_t size = itemsize(tensor.meta.dtype);
  require(begin >= 0 && begin < numel && begin % block == 0, "a block begins at a multiple");
  require(bytes.size() == static_cast<std::uint64_t>(std::min(block, numel - begin)) * size,
          "a block has the announced size");
  const std::scoped_lock lock(mutex_);
  require(!committed_, "no block after commit");
  const bool first =
      written_.emplace(place_in_order_.at({piece.tensor_index, piece.piece_index}), begin).second;
  require(first, "each block once");
  Bytes& stored = piece_bytes_[piece.tensor_index][piece.piece_index];
  std::memcpy(stored.data() + static_cast<std::uint64_t>(begin) * size, bytes.data(), bytes.size());
}

void MemoryWriter::abandon() noexcept {
  abandoned_ = true;
}

void MemoryWriter::commit() {
  const std::scoped_lock lock(mutex_);
  require(!committed_, "one commit");
  require(!abandoned_, "no commit after abandon");
  require(written_.size() == num_blocks_expected_, "every block before commit");
  committed_ = true;
}

MemoryCheckpoint MemoryWriter::result(std::string path) const {
  require(committed_, "a result after commit");
  return MemoryCheckpoint(std::move(path), contents_, piece_bytes_, values_);
}

}  // namespace tessera::test
