#include "formats/native/index.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/checked_math.h"
#include "base/digest.h"
#include "base/json.h"
#include "formats/key_order.h"
#include "formats/native/byte_stream.h"
#include "formats/own_annotations.h"
#include "formats/piece_pool.h"
#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

constexpr std::uint8_t kBoxTag = 0;
constexpr std::uint8_t kFlatRangeTag = 1;
constexpr std::uint8_t kStringKeyTag = 0;
constexpr std::uint8_t kPositionTag = 1;
constexpr std::uint8_t kNonStringKeyTag = 2;
constexpr std::uint8_t kMaxStateKind = static_cast<std::uint8_t>(StateKind::row_wise_per_shard);
constexpr std::uint8_t kMaxEncoding = static_cast<std::uint8_t>(Encoding::zstd);
constexpr std::uint8_t kLinkedTag = 3;   // comes before the encoding of a linked piece
constexpr std::uint8_t kPatchedTag = 4;  // of a linked piece with a patch

/// The most rows of a patch. With more, its size in bytes could overflow.
constexpr std::uint64_t kMaxPatchRows = std::uint64_t{1} << (StoredPieces::kBeginBits - 3);

constexpr std::size_t kIndexPartNbytes = std::size_t{1} << 20;

constexpr JsonLimits kKeyLimits = {.max_depth = 1000};  // the same for keys and values

// The least number of bytes that one item of each list takes.
constexpr std::size_t kMinValueNbytes = 3;
constexpr std::size_t kMinAliasNbytes = 3;
constexpr std::size_t kMinUnitNbytes = 3;
constexpr std::size_t kMinUnitParameterNbytes = 3;
constexpr std::size_t kMinAnnotationNbytes = 2;
constexpr std::size_t kMinTensorNbytes = 7;
constexpr std::size_t kMinPieceNbytes = 4;
constexpr std::size_t kMinRankFileNbytes = 17;
constexpr std::size_t kMinLinkedFileNbytes = 29;

// --- encoding

void put_shape(ByteWriter& out, const Shape& shape) {
  out.uint(std::uint64_t{shape.size()});
  for (const std::int64_t size : shape) out.uint(size);
}

void put_key_path(ByteWriter& out, const KeyPath& key_path) {
  out.uint(std::uint64_t{key_path.size()});
  for (const auto& key : key_path) {
    if (const auto* text = std::get_if<std::string>(&key)) {
      out.u8(kStringKeyTag);
      out.str(*text);
    } else if (const auto* other = std::get_if<NonStringKey>(&key)) {
      out.u8(kNonStringKeyTag);
      out.str(other->json);
    } else {
      out.u8(kPositionTag);
      out.sint(std::get<std::int64_t>(key));
    }
  }
}

void put_region(ByteWriter& out, const Region& region) {
  if (const auto* box = std::get_if<Box>(&region)) {
    out.u8(kBoxTag);
    for (std::size_t d = 0; d < box->sizes.size(); ++d) {
      out.uint(box->offsets[d]);
      out.uint(box->sizes[d]);
    }
    return;
  }
  const auto& range = std::get<FlatRange>(region);
  out.u8(kFlatRangeTag);
  out.uint(range.begin);
  out.uint(range.numel());
}

void put_blocks(ByteWriter& out, const StoredPiece& stored, const BlockGrid& grid) {
  if (grid.num_blocks() == 1) {
    out.u64(stored.checksum_or_table);
  } else {
    out.uint(stored.checksum_or_table);
  }
}

void put_patch(ByteWriter& out, const StoredPatch& patch) {
  out.uint(patch.num_rows);
  for (const StoredPiece* const part : {&patch.numbers, &patch.rows}) {
    out.uint(part->begin);
    put_blocks(out, *part, grid_of(*part));
  }
}

void put_stored(ByteWriter& out, const Index& index, PieceId id) {
  const StoredPiece stored = index.stored(id);
  const StoredPatch* const patch = index.patch(id);
  if (stored.file != 0) {
    out.u8(patch != nullptr ? kPatchedTag : kLinkedTag);
    out.uint(std::uint64_t{stored.file - 1U});
    out.uint(index.linked_place(id));
  }
  out.u8(static_cast<std::uint8_t>(stored.encoding));
  if (stored.encoding == Encoding::none) return;
  out.uint(stored.begin);
  if (stored.encoding == Encoding::zstd) out.uint(stored.stored_nbytes);
  put_blocks(out, stored, index.grid(id));
  if (patch != nullptr) put_patch(out, *patch);
}

BlockGrid make_grid(Encoding encoding, std::uint64_t nbytes, std::uint64_t chunk_nbytes) {
  if (encoding == Encoding::zstd)
    return {std::min(chunk_nbytes, std::max<std::uint64_t>(nbytes, 1)), nbytes};
  return {kPlainBlockNbytes, nbytes};
}

/// Returns the size of compressed chunks in the file that holds the piece.
std::uint64_t chunk_nbytes_of(const Index& index, const StoredPiece& stored) {
  return stored.file == 0 ? index.chunk_nbytes : index.linked_files[stored.file - 1].chunk_nbytes;
}

void put_record(ByteWriter& out, const RankFileRecord& record) {
  out.uint(record.nbytes);
  out.u64(record.index_checksum);
  out.u64(record.structure_checksum);
}

void put_linked_files(ByteWriter& out, const std::vector<LinkedFile>& files) {
  out.uint(std::uint64_t{files.size()});
  for (const LinkedFile& file : files) {
    out.u64(file.checkpoint_id);
    out.uint(std::uint64_t{file.rank});
    out.uint(std::uint64_t{file.world_size});
    out.uint(std::uint64_t{file.format_version});
    out.uint(file.chunk_nbytes);
    put_record(out, file.record);
  }
}

/// Writes a tensor without its pieces, but with their number.
void put_tensor(ByteWriter& out, const TensorEntry& tensor, std::size_t num_pieces) {
  out.str(tensor.meta.fqn);
  out.u8(static_cast<std::uint8_t>(tensor.meta.dtype));
  out.u8(static_cast<std::uint8_t>(tensor.kind));
  put_shape(out, tensor.meta.shape);
  out.str(tensor.parameter);
  put_key_path(out, tensor.key_path);
  out.uint(std::uint64_t{num_pieces});
}

void put_piece(ByteWriter& out, const Index& index, PieceId id) {
  const TensorEntry& tensor = index.contents->tensors[id.tensor_index];
  const Piece& piece = tensor.pieces[id.piece_index];
  out.uint(std::uint64_t{index.stored(id).position});
  out.uint(std::int64_t{piece.rank});
  put_region(out, piece.region);
  put_stored(out, index, id);
}

/// Writes the annotations, and the order of keys as one of them.
void put_annotations(ByteWriter& out, const Index& index) {
  std::map<std::string_view, std::string_view> annotations(index.contents->annotations.begin(),
                                                           index.contents->annotations.end());
  if (!index.key_order.empty()) annotations[kKeyOrderAnnotation] = index.key_order;
  out.uint(std::uint64_t{annotations.size()});
  for (const auto& [key, text] : annotations) {
    out.str(key);
    out.str(text);
  }
}

/// Writes everything before the tensors.
void put_preamble(ByteWriter& out, const Index& index) {
  const CheckpointContents& contents = index.contents;
  out.uint(index.chunk_nbytes);
  out.u8(index.has_virtual_datasets ? 1 : 0);
  out.uint(std::uint64_t{contents.values.size()});
  for (std::size_t v = 0; v < contents.values.size(); ++v) {
    out.str(contents.values[v].name);
    put_key_path(out, contents.values[v].key_path);
    out.str(index.value_json[v]);
  }
  out.uint(std::uint64_t{contents.aliases.size()});
  for (const Alias& alias : contents.aliases) {
    out.str(alias.fqn);
    out.str(alias.target);
    put_key_path(out, alias.key_path);
  }
  out.uint(std::uint64_t{contents.units.size()});
  for (const FlatUnit& unit : contents.units) {
    out.str(unit.name);
    out.u8(static_cast<std::uint8_t>(unit.dtype));
    out.uint(std::uint64_t{unit.parameters.size()});
    for (const FlatUnitParameter& parameter : unit.parameters) {
      out.str(parameter.fqn);
      put_shape(out, parameter.shape);
      out.uint(parameter.offset);
    }
  }
  put_annotations(out, index);
  if (index.format_version >= kLinkedVersion) put_linked_files(out, index.linked_files);
}

/// If `out` has kIndexPartNbytes or more, passes its bytes to `sink` and clears `out`.
void pass_on(ByteWriter& out, const IndexSink& sink) {
  if (out.bytes().size() < kIndexPartNbytes) return;
  sink(out.bytes());
  out.clear();
}

// --- decoding

Shape get_shape(ByteReader& in) {
  const std::size_t num_dims = in.count(1);
  if (num_dims > kMaxDims) {
    in.fail("dimensions", "at most " + std::to_string(kMaxDims), std::to_string(num_dims));
  }
  Shape shape(num_dims);
  for (std::int64_t& size : shape) size = in.non_negative();
  return shape;
}

NonStringKey get_non_string_key(ByteReader& in) {
  const std::string json(in.str());
  std::optional<Key> key;
  try {
    key = dict_key(value_from_json(parse_json(json, in.path(), kKeyLimits), in.path()));
  } catch (const Error&) {
    key.reset();
  }
  const auto* other = key ? std::get_if<NonStringKey>(&*key) : nullptr;
  if (other == nullptr || other->json != json) {
    in.fail("dict key", "the JSON of a key that is not text", "'" + printable(json) + "'");
  }
  return *other;
}

KeyPath get_key_path(ByteReader& in) {
  KeyPath key_path(in.count(2));
  for (auto& key : key_path) {
    const std::uint8_t tag = in.u8();
    if (tag == kStringKeyTag) {
      key.emplace<std::string>(in.str());
    } else if (tag == kPositionTag) {
      key.emplace<std::int64_t>(in.sint());
    } else if (tag == kNonStringKeyTag) {
      key = get_non_string_key(in);
    } else {
      in.fail("kind of a key", "0 (text), 1 (position) or 2 (other)", std::to_string(tag));
    }
  }
  return key_path;
}

DType get_dtype(ByteReader& in) {
  const std::uint8_t code = in.u8();
  const auto dtype = dtype_from_code(code);
  if (!dtype) in.fail("dtype", "less than " + std::to_string(kNumDTypes), std::to_string(code));
  return *dtype;
}

Region get_region(ByteReader& in, std::size_t num_dims) {
  const std::uint8_t tag = in.u8();
  if (tag == kBoxTag) {
    Box box{Shape(num_dims), Shape(num_dims)};
    for (std::size_t d = 0; d < num_dims; ++d) {
      box.offsets[d] = in.non_negative();
      box.sizes[d] = in.non_negative();
    }
    return box;
  }
  if (tag != kFlatRangeTag) in.fail("region", "0 or 1", std::to_string(tag));
  FlatRange range;
  range.begin = in.non_negative();
  const auto end = checked_add(range.begin, in.non_negative());
  if (!end) in.fail("region", "an end below 2^63", "a larger end");
  range.end = *end;
  return range;
}

/// Reads the number of a linked file into `stored`. Returns the piece's place in that file.
std::uint64_t get_link(ByteReader& in, const Index& index, StoredPiece& stored) {
  const std::uint64_t number = in.uint();
  if (number >= index.linked_files.size()) {
    in.fail("linked file", "less than " + std::to_string(index.linked_files.size()),
            std::to_string(number));
  }
  stored.file = static_cast<std::uint32_t>(number + 1);
  return static_cast<std::uint64_t>(in.non_negative());
}

std::uint64_t get_begin(ByteReader& in) {
  const std::uint64_t begin = in.uint();
  if (begin >> StoredPieces::kBeginBits != 0) {
    in.fail("byte range", "a begin below 2^" + std::to_string(StoredPieces::kBeginBits),
            std::to_string(begin));
  }
  return begin;
}

void get_blocks(ByteReader& in, const BlockGrid& grid, StoredPiece& stored) {
  stored.checksum_or_table = grid.num_blocks() == 1 ? in.u64() : in.uint();
}

/// Reads the patch of a piece of `tensor`.
StoredPatch get_patch(ByteReader& in, const TensorEntry& tensor, const Region& region) {
  const auto rows = rows_of(region, tensor.meta);
  if (!rows) {
    in.fail("patched piece of " + printable(tensor.meta.fqn),
            "a box of two or more rows with all columns", region_to_string(region));
  }
  const std::uint64_t num_rows = in.uint();
  const std::uint64_t max_rows =
      std::min(static_cast<std::uint64_t>(rows->num_rows), kMaxPatchRows);
  if (num_rows == 0 || num_rows > max_rows) {
    in.fail("rows of the patch of " + printable(tensor.meta.fqn),
            "1 to " + std::to_string(max_rows), std::to_string(num_rows));
  }
  StoredPatch patch = empty_patch(num_rows, *rows);
  for (StoredPiece* const part : {&patch.numbers, &patch.rows}) {
    part->begin = get_begin(in);
    get_blocks(in, grid_of(*part), *part);
  }
  return patch;
}

/// Reads a piece's encoding, which a linked piece has after a tag and a link. Returns its code.
std::uint8_t get_tags(ByteReader& in, const Index& index, std::uint64_t nbytes, StoredPiece& stored,
                      std::uint64_t& place, bool& is_patched) {
  const std::uint8_t code = in.u8();
  is_patched = code == kPatchedTag && index.format_version >= kPatchedVersion;
  const bool is_linked =
      is_patched || (code == kLinkedTag && index.format_version >= kLinkedVersion);
  if (!is_linked || nbytes == 0) return code;
  place = get_link(in, index, stored);
  return in.u8();
}

/// Sets `place` only for a linked piece. Always sets `is_patched`: whether a patch follows.
StoredPiece get_stored(ByteReader& in, const Index& index, std::uint64_t nbytes,
                       std::uint64_t& place, bool& is_patched) {
  StoredPiece stored;
  const std::uint8_t code = get_tags(in, index, nbytes, stored, place, is_patched);
  const std::uint64_t chunk_nbytes = chunk_nbytes_of(index, stored);
  const BlockGrid plain = make_grid(Encoding::plain, nbytes, chunk_nbytes);
  const BlockGrid chunks = make_grid(Encoding::zstd, nbytes, chunk_nbytes);
  if (code > kMaxEncoding) in.fail("encoding", "0 to 2", std::to_string(code));
  stored.encoding = static_cast<Encoding>(code);
  if ((stored.encoding == Encoding::none) != (plain.nbytes == 0)) {
    in.fail("encoding", plain.nbytes == 0 ? "none for a piece without elements" : "plain or zstd",
            std::to_string(code));
  }
  if (stored.encoding == Encoding::none) return stored;
  const BlockGrid& grid = stored.encoding == Encoding::zstd ? chunks : plain;
  stored.begin = get_begin(in);
  stored.stored_nbytes = stored.encoding == Encoding::zstd ? in.uint() : grid.nbytes;
  get_blocks(in, grid, stored);
  return stored;
}

std::uint64_t get_chunk_nbytes(ByteReader& in) {
  const std::uint64_t nbytes = in.uint();
  if (nbytes == 0 || nbytes > kMaxChunkNbytes || nbytes % kChunkNbytesUnit != 0) {
    in.fail("chunk size",
            "a multiple of " + std::to_string(kChunkNbytesUnit) + " up to " +
                std::to_string(kMaxChunkNbytes),
            std::to_string(nbytes));
  }
  return nbytes;
}

void get_storage_options(ByteReader& in, Index& index) {
  index.chunk_nbytes = get_chunk_nbytes(in);
  const std::uint8_t virtual_datasets = in.u8();
  if (virtual_datasets > 1) {
    in.fail("virtual datasets", "0 or 1", std::to_string(virtual_datasets));
  }
  index.has_virtual_datasets = virtual_datasets == 1;
}

void get_values(ByteReader& in, Index& index) {
  std::vector<ValueEntry>& values = index.contents.edit().values;
  values.resize(in.count(kMinValueNbytes));
  index.value_json.resize(values.size());
  for (std::size_t v = 0; v < values.size(); ++v) {
    values[v].name = in.str();
    values[v].key_path = get_key_path(in);
    index.value_json[v] = in.str();
  }
}

void get_aliases(ByteReader& in, CheckpointContents& contents) {
  contents.aliases.resize(in.count(kMinAliasNbytes));
  for (Alias& alias : contents.aliases) {
    alias.fqn = in.str();
    alias.target = in.str();
    alias.key_path = get_key_path(in);
  }
}

void get_units(ByteReader& in, CheckpointContents& contents) {
  contents.units.resize(in.count(kMinUnitNbytes));
  for (FlatUnit& unit : contents.units) {
    unit.name = in.str();
    unit.dtype = get_dtype(in);
    unit.parameters.resize(in.count(kMinUnitParameterNbytes));
    for (FlatUnitParameter& parameter : unit.parameters) {
      parameter.fqn = in.str();
      parameter.shape = get_shape(in);
      parameter.offset = in.non_negative();
      const auto numel = checked_numel(parameter.shape);
      if (!numel || !checked_add(parameter.offset, *numel)) {
        throw Error::expected(ErrorKind::corruption,
                              {.path = in.path(), .fqn = parameter.fqn, .byte_range = {}}, "unit",
                              "less than 2^63 elements", "more");
      }
    }
  }
}

void get_annotations(ByteReader& in, Index& index) {
  CheckpointContents& contents = index.contents.edit();
  const std::size_t num_annotations = in.count(kMinAnnotationNbytes);
  for (std::size_t a = 0; a < num_annotations; ++a) {
    std::string key(in.str());
    const bool is_new = contents.annotations.emplace(std::move(key), in.str()).second;
    if (!is_new) in.fail("annotation", "different keys", "the same key twice");
  }
  const auto order = contents.annotations.find(std::string(kKeyOrderAnnotation));
  if (order == contents.annotations.end()) return;
  index.key_order = std::move(order->second);
  contents.annotations.erase(order);
}

/// Sets the entries' order of keys. Does nothing for a rank file, which lacks some entries.
void apply_key_order(const FileHeader& header, Index& index, const std::string& path) {
  if (header.role != FileRole::index || index.key_order.empty()) return;
  CheckpointContents& contents = index.contents.edit();
  if (set_key_order(contents, index.key_order)) return;
  const std::size_t num_entries =
      contents.tensors.size() + contents.aliases.size() + contents.values.size();
  throw Error::expected(ErrorKind::corruption, {.path = path}, "order of keys",
                        "each number below " + std::to_string(num_entries) + " once",
                        "'" + printable(index.key_order, 80) + "'");
}

/// Reads a tensor without its pieces. Returns the number of its pieces.
std::size_t get_tensor(ByteReader& in, TensorEntry& tensor) {
  tensor.meta.fqn = in.str();
  tensor.meta.dtype = get_dtype(in);
  const std::uint8_t kind = in.u8();
  if (kind > kMaxStateKind) {
    in.fail("state kind", "at most " + std::to_string(kMaxStateKind), std::to_string(kind));
  }
  tensor.kind = static_cast<StateKind>(kind);
  tensor.meta.shape = get_shape(in);
  validate_tensor_meta(tensor.meta, in.path());
  tensor.parameter = in.str();
  tensor.key_path = get_key_path(in);
  return in.count(kMinPieceNbytes);
}

int get_rank(ByteReader& in, const FileHeader& header) {
  const std::uint64_t rank = in.uint();
  if (rank >= header.world_size || (header.role == FileRole::rank && rank != header.rank)) {
    in.fail("rank",
            header.role == FileRole::rank ? std::to_string(header.rank)
                                          : "less than " + std::to_string(header.world_size),
            std::to_string(rank));
  }
  return static_cast<int>(rank);
}

/// Reads a piece of the tensor into `piece`, and its place into `index.storage`. `last_position`:
/// the position of the tensor's previous piece; becomes this piece's.
void get_piece(ByteReader& in, const FileHeader& header, Index& index, const TensorEntry& tensor,
               PieceId id, Piece& piece, std::uint64_t& last_position) {
  const std::uint64_t position = in.uint();
  piece.rank = get_rank(in, header);
  piece.region = get_region(in, tensor.meta.shape.size());
  if (const auto broken = region_error(piece.region, tensor.meta.shape)) {
    throw Error(ErrorKind::corruption,
                {.path = in.path(), .fqn = tensor.meta.fqn, .byte_range = {}},
                "region: " + *broken);
  }
  const std::uint64_t nbytes = nbytes_of(piece.region, tensor.meta.dtype);
  std::uint64_t place = 0;
  bool is_patched = false;
  StoredPiece stored = get_stored(in, index, nbytes, place, is_patched);
  if (!index.linked_files.empty()) index.linked_places.push_back(place);
  if (is_patched) index.patches.emplace(id, get_patch(in, tensor, piece.region));
  const bool is_in_place =
      header.role == FileRole::index
          ? position == id.piece_index
          : position <= UINT32_MAX && (id.piece_index == 0 || position > last_position);
  if (!is_in_place) {
    in.fail("piece position", "increasing numbers", std::to_string(position));
  }
  last_position = position;
  stored.position = static_cast<std::uint32_t>(position);
  index.storage.set(id, stored);
}

void get_tensors(ByteReader& in, const FileHeader& header, Index& index) {
  std::vector<TensorEntry>& tensors = index.contents.edit().tensors;
  tensors.resize(in.count(kMinTensorNbytes));
  index.storage.reserve(tensors.size(), 0);
  PiecePool pool;
  std::vector<Piece> pieces;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    pieces.resize(get_tensor(in, tensors[t]));
    index.storage.add(pieces.size());
    std::uint64_t last_position = 0;
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      get_piece(in, header, index, tensors[t], {t, p}, pieces[p], last_position);
    }
    tensors[t].pieces = pool.share_copy(pieces);
  }
  index.storage.shrink_to_fit();
}

RankFileRecord get_record(ByteReader& in) {
  RankFileRecord record;
  record.nbytes = in.uint();
  record.index_checksum = in.u64();
  record.structure_checksum = in.u64();
  return record;
}

/// Reads a number from `min` to `max`.
std::uint32_t get_number(ByteReader& in, std::string_view rule, std::uint32_t min,
                         std::uint32_t max) {
  const std::uint64_t number = in.uint();
  if (number < min || number > max) {
    in.fail(rule, std::to_string(min) + " to " + std::to_string(max), std::to_string(number));
  }
  return static_cast<std::uint32_t>(number);
}

void get_linked_files(ByteReader& in, Index& index) {
  if (index.format_version < kLinkedVersion) return;
  index.linked_files.resize(in.count(kMinLinkedFileNbytes));
  if (index.linked_files.size() > kMaxLinkedFiles) {
    in.fail("linked files", "at most " + std::to_string(kMaxLinkedFiles),
            std::to_string(index.linked_files.size()));
  }
  const LinkedFile* last = nullptr;
  for (LinkedFile& file : index.linked_files) {
    file.checkpoint_id = in.u64();
    file.rank = get_number(in, "rank of a linked file", 0, kMaxWorldSize - 1);
    file.world_size = get_number(in, "world size of a linked file", file.rank + 1, kMaxWorldSize);
    file.format_version = get_number(in, "version of a linked file", kFirstVersion, kNewestVersion);
    file.chunk_nbytes = get_chunk_nbytes(in);
    file.record = get_record(in);
    if (last != nullptr &&
        std::pair(last->checkpoint_id, last->rank) >= std::pair(file.checkpoint_id, file.rank)) {
      in.fail("linked files", "files sorted by name, each once",
              last->name() + ", then " + file.name());
    }
    last = &file;
  }
}

void get_rank_files(ByteReader& in, const FileHeader& header, Index& index) {
  index.rank_files.resize(in.count(kMinRankFileNbytes));
  for (RankFileRecord& file : index.rank_files) file = get_record(in);
  const std::size_t num_rank_files = header.role == FileRole::index ? header.world_size : 0;
  if (index.rank_files.size() != num_rank_files) {
    in.fail("rank files", std::to_string(num_rank_files), std::to_string(index.rank_files.size()));
  }
}

bool lies_within(std::uint64_t begin, std::uint64_t nbytes, std::uint64_t file_nbytes) {
  return begin >= kHeaderNbytes && begin <= file_nbytes && nbytes <= file_nbytes - begin;
}

/// Throws unless block tables, and pieces except those of several chunks, are within their files.
void validate_storage(const Index& index, const FileHeader& header, const std::string& path) {
  for (std::size_t t = 0; t < index.contents->tensors.size(); ++t) {
    const TensorEntry& tensor = index.contents->tensors[t];
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      const StoredPiece stored = index.stored({t, p});
      if (stored.encoding == Encoding::none) continue;
      const auto rank = static_cast<std::size_t>(tensor.pieces[p].rank);
      const std::uint64_t file_nbytes =
          stored.file != 0                 ? index.linked_files[stored.file - 1].record.nbytes
          : header.role == FileRole::index ? index.rank_files[rank].nbytes
                                           : header.file_nbytes;
      const BlockGrid grid = index.grid({t, p});
      const auto fail = [&](std::string_view rule, std::uint64_t begin, std::uint64_t nbytes) {
        throw Error::expected(
            ErrorKind::corruption, {.path = path, .fqn = tensor.meta.fqn, .byte_range = {}}, rule,
            "within [" + std::to_string(kHeaderNbytes) + ", " + std::to_string(file_nbytes) + ")",
            std::to_string(nbytes) + " bytes at " + std::to_string(begin));
      };
      if (stored.encoding == Encoding::plain || grid.num_blocks() == 1) {
        if (!lies_within(stored.begin, stored.stored_nbytes, file_nbytes)) {
          fail("byte range", stored.begin, stored.stored_nbytes);
        }
      }
      if (stored.encoding == Encoding::zstd && grid.num_blocks() == 1 &&
          (stored.stored_nbytes == 0 || stored.stored_nbytes > grid.block_nbytes)) {
        throw Error::expected(ErrorKind::corruption,
                              {.path = path, .fqn = tensor.meta.fqn, .byte_range = {}},
                              "chunk size", "1 to " + std::to_string(grid.block_nbytes) + " bytes",
                              std::to_string(stored.stored_nbytes));
      }
      if (stored.encoding == Encoding::zstd && grid.num_blocks() > 1) {
        // The place of each chunk is in the block table, which is only read with the data.
        const std::uint64_t max_nbytes = std::min(
            checked_mul(grid.num_blocks(), grid.block_nbytes).value_or(UINT64_MAX), file_nbytes);
        if (stored.stored_nbytes < grid.num_blocks() || stored.stored_nbytes > max_nbytes) {
          throw Error::expected(
              ErrorKind::corruption, {.path = path, .fqn = tensor.meta.fqn, .byte_range = {}},
              "size of all chunks",
              std::to_string(grid.num_blocks()) + " to " + std::to_string(max_nbytes) + " bytes",
              std::to_string(stored.stored_nbytes));
        }
      }
      if (grid.num_blocks() > 1) {
        const auto table_nbytes =
            checked_mul(grid.num_blocks(), table_entry_nbytes(stored.encoding));
        if (!table_nbytes || !lies_within(stored.checksum_or_table, *table_nbytes, file_nbytes)) {
          fail("block table", stored.checksum_or_table, table_nbytes.value_or(UINT64_MAX));
        }
      }
    }
  }
}

/// Throws unless the bytes of all patches are within the file of their rank.
void validate_patches(const Index& index, const FileHeader& header, const std::string& path) {
  for (const auto& [id, patch] : index.patches) {
    const TensorEntry& tensor = index.contents->tensors[id.tensor_index];
    const auto rank = static_cast<std::size_t>(tensor.pieces[id.piece_index].rank);
    const std::uint64_t file_nbytes =
        header.role == FileRole::index ? index.rank_files[rank].nbytes : header.file_nbytes;
    const auto require_within = [&](std::string_view rule, std::uint64_t begin,
                                    std::uint64_t nbytes) {
      if (lies_within(begin, nbytes, file_nbytes)) return;
      throw Error::expected(
          ErrorKind::corruption, {.path = path, .fqn = tensor.meta.fqn, .byte_range = {}}, rule,
          "within [" + std::to_string(kHeaderNbytes) + ", " + std::to_string(file_nbytes) + ")",
          std::to_string(nbytes) + " bytes at " + std::to_string(begin));
    };
    for (const StoredPiece* const part : {&patch.numbers, &patch.rows}) {
      require_within("byte range of a patch", part->begin, part->stored_nbytes);
      const std::uint64_t num_blocks = grid_of(*part).num_blocks();
      if (num_blocks == 1) continue;
      require_within("block table of a patch", part->checksum_or_table,
                     num_blocks * table_entry_nbytes(Encoding::plain));
    }
  }
}

/// Throws Error(kind) unless names are sorted and unique, and aliases have targets.
void validate_names(const CheckpointContents& contents, ErrorKind kind, const std::string& path) {
  const auto fail = [&](const std::string& name, std::string_view rule, std::string_view expected,
                        std::string_view found) {
    throw Error::expected(kind, {.path = path, .fqn = name, .byte_range = {}}, rule, expected,
                          found);
  };
  const auto require_sorted = [&](const auto& list, auto name_of) {
    for (std::size_t i = 1; i < list.size(); ++i) {
      if (!(name_of(list[i - 1]) < name_of(list[i]))) {
        fail(name_of(list[i]), "names", "sorted and unique",
             "'" + printable(name_of(list[i])) + "' after '" + printable(name_of(list[i - 1])) +
                 "'");
      }
    }
  };
  const auto tensor_name = [](const TensorEntry& tensor) -> const std::string& {
    return tensor.meta.fqn;
  };
  const auto value_name = [](const ValueEntry& value) -> const std::string& { return value.name; };
  const auto alias_name = [](const Alias& alias) -> const std::string& { return alias.fqn; };
  require_sorted(contents.tensors, tensor_name);
  require_sorted(contents.values, value_name);
  require_sorted(contents.aliases, alias_name);
  const auto has_tensor = [&](const std::string& name) {
    return std::ranges::binary_search(contents.tensors, name, {}, tensor_name);
  };
  const auto has_value = [&](const std::string& name) {
    return std::ranges::binary_search(contents.values, name, {}, value_name);
  };
  for (const ValueEntry& value : contents.values) {
    if (has_tensor(value.name))
      fail(value.name, "names", "one entry of this name", "a tensor and a value");
  }
  for (const Alias& alias : contents.aliases) {
    if (has_tensor(alias.fqn))
      fail(alias.fqn, "names", "one entry of this name", "a tensor and an alias");
    if (has_value(alias.fqn))
      fail(alias.fqn, "names", "one entry of this name", "a value and an alias");
    if (!has_tensor(alias.target)) {
      fail(alias.fqn, "alias", "a tensor as target",
           "'" + printable(alias.target) + "', which is no tensor");
    }
  }
}

/// Copies everything except tensors and pieces.
Index without_tensors(const Index& whole) {
  Index index;
  index.format_version = whole.format_version;
  index.chunk_nbytes = whole.chunk_nbytes;
  index.has_virtual_datasets = whole.has_virtual_datasets;
  CheckpointContents& contents = index.contents.edit();
  contents.world_size = whole.contents->world_size;
  contents.values = whole.contents->values;
  contents.aliases = whole.contents->aliases;
  contents.units = whole.contents->units;
  contents.annotations = whole.contents->annotations;
  index.value_json = whole.value_json;
  index.key_order = whole.key_order;
  index.linked_files = whole.linked_files;
  return index;
}

/// Copies a tensor without its pieces.
TensorEntry without_pieces(const TensorEntry& tensor) {
  return {tensor.meta, tensor.kind, tensor.dict_order, tensor.parameter, tensor.key_path, {}};
}

/// Does the same as validate_tensor_meta, but throws an error of this kind.
void validate_meta(const TensorMeta& meta, ErrorKind kind, const std::string& path) {
  try {
    validate_tensor_meta(meta, path);
  } catch (const Error& wrong) {
    throw Error(kind, wrong.where(), wrong.reason());
  }
}

}  // namespace

ByteRange BlockGrid::block(std::uint64_t number) const {
  const std::uint64_t begin = number * block_nbytes;
  return {begin, std::min(begin + block_nbytes, nbytes)};
}

void StoredPieces::add(std::size_t num_pieces) {
  slots_.add(num_pieces);
  if (rest_.empty()) return;
  for (std::size_t p = 0; p < num_pieces; ++p) {
    rest_.push_back({.position = static_cast<std::uint32_t>(p)});
  }
}

StoredPiece StoredPieces::get(PieceId id, std::uint64_t nbytes) const {
  const Slot& slot = slots_[id.tensor_index][id.piece_index];
  StoredPiece stored{.position = id.piece_index,
                     .encoding = static_cast<Encoding>(slot.encoding),
                     .begin = slot.begin,
                     .checksum_or_table = slot.checksum_or_table};
  if (stored.encoding == Encoding::plain) stored.stored_nbytes = nbytes;
  if (rest_.empty()) return stored;
  const Rest& rest = rest_[number_of(id)];
  stored.position = rest.position;
  stored.file = rest.file;
  if (stored.encoding == Encoding::zstd) stored.stored_nbytes = rest.stored_nbytes;
  return stored;
}

void StoredPieces::set_place(PieceId id, Encoding encoding, std::uint64_t begin) {
  constexpr std::uint64_t kMaxBegin = (std::uint64_t{1} << kBeginBits) - 1;
  TESSERA_CHECK(begin <= kMaxBegin);
  Slot& slot = slots_[id.tensor_index][id.piece_index];
  slot.begin = begin & kMaxBegin;
  slot.encoding = static_cast<std::uint8_t>(encoding);
}

void StoredPieces::set(PieceId id, const StoredPiece& stored) {
  set_place(id, stored.encoding, stored.begin);
  set_checksum(id, stored.checksum_or_table);
  const bool is_usual =
      stored.encoding != Encoding::zstd && stored.file == 0 && stored.position == id.piece_index;
  if (is_usual && rest_.empty()) return;
  keep_all_members();
  rest_[number_of(id)] = {.position = stored.position, .file = stored.file};
  if (stored.encoding == Encoding::zstd) rest_[number_of(id)].stored_nbytes = stored.stored_nbytes;
}

void StoredPieces::keep_all_members() {
  if (!rest_.empty()) return;
  rest_.reserve(num_pieces());
  for (std::size_t t = 0; t < slots_.size(); ++t) {
    for (std::size_t p = 0; p < slots_[t].size(); ++p) {
      rest_.push_back({.position = static_cast<std::uint32_t>(p)});
    }
  }
}

StoredPiece Index::stored(PieceId id) const {
  const TensorEntry& tensor = contents->tensors[id.tensor_index];
  return storage.get(id, nbytes_of(tensor.pieces[id.piece_index].region, tensor.meta.dtype));
}

BlockGrid Index::grid(PieceId id) const {
  const TensorEntry& tensor = contents->tensors[id.tensor_index];
  const std::uint64_t nbytes = nbytes_of(tensor.pieces[id.piece_index].region, tensor.meta.dtype);
  const StoredPiece stored = storage.get(id, nbytes);
  return make_grid(stored.encoding, nbytes, chunk_nbytes_of(*this, stored));
}

StoredPatch empty_patch(std::uint64_t num_rows, const PieceRows& rows) {
  StoredPatch patch{.num_rows = num_rows};
  patch.numbers.encoding = Encoding::plain;
  patch.numbers.stored_nbytes = num_rows * sizeof(std::uint64_t);
  patch.rows.encoding = Encoding::plain;
  patch.rows.stored_nbytes = num_rows * rows.row_nbytes;
  return patch;
}

BlockGrid grid_of(const StoredPiece& part_of_patch) {
  return {kPlainBlockNbytes, part_of_patch.stored_nbytes};
}

const StoredPatch* Index::patch(PieceId id) const {
  const auto found = patches.find(id);
  return found == patches.end() ? nullptr : &found->second;
}

PieceRows Index::rows(PieceId id) const {
  const TensorEntry& tensor = contents->tensors[id.tensor_index];
  const auto rows = rows_of(tensor.pieces[id.piece_index].region, tensor.meta);
  TESSERA_CHECK(rows.has_value());
  return *rows;
}

std::uint64_t Index::linked_place(PieceId id) const {
  return linked_places.empty() ? 0 : linked_places[storage.number_of(id)];
}

std::uint64_t table_entry_nbytes(Encoding encoding) {
  return encoding == Encoding::zstd ? 3 * sizeof(std::uint64_t) : sizeof(std::uint64_t);
}

void encode_index(const Index& index, const IndexSink& sink) {
  const std::vector<TensorEntry>& tensors = index.contents->tensors;
  ByteWriter out;
  put_preamble(out, index);
  out.uint(std::uint64_t{tensors.size()});
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    put_tensor(out, tensors[t], tensors[t].pieces.size());
    for (std::size_t p = 0; p < tensors[t].pieces.size(); ++p) {
      put_piece(out, index, {t, p});
      pass_on(out, sink);
    }
  }
  out.uint(std::uint64_t{index.rank_files.size()});
  for (const RankFileRecord& file : index.rank_files) put_record(out, file);
  sink(out.bytes());
}

std::vector<std::byte> encode_index(const Index& index) {
  std::vector<std::byte> bytes;
  encode_index(index, [&](std::span<const std::byte> part) {
    bytes.insert(bytes.end(), part.begin(), part.end());
  });
  return bytes;
}

EncodedIndex measure_index(const std::function<void(const IndexSink&)>& encode) {
  EncodedIndex encoded;
  Xxh3 checksum;
  encode([&](std::span<const std::byte> part) {
    encoded.nbytes += part.size();
    checksum.update(part);
  });
  encoded.checksum = checksum.digest();
  return encoded;
}

void encode_rank_index(const Index& whole, std::span<const PieceId> pieces, const IndexSink& sink) {
  // Calls `visit` for each tensor of the rank. `[begin, end)`: the tensor's part of `pieces`.
  const auto for_each_tensor = [&](const auto& visit) {
    std::size_t begin = 0;
    for (std::size_t t = 0; t < whole.contents->tensors.size(); ++t) {
      std::size_t end = begin;
      while (end < pieces.size() && pieces[end].tensor_index == t) ++end;
      const TensorEntry& tensor = whole.contents->tensors[t];
      if (end > begin || tensor.pieces.empty()) visit(tensor, begin, end);
      begin = end;
    }
  };
  std::uint64_t num_tensors = 0;
  for_each_tensor([&](const TensorEntry&, std::size_t, std::size_t) { ++num_tensors; });
  ByteWriter out;
  put_preamble(out, whole);
  out.uint(num_tensors);
  for_each_tensor([&](const TensorEntry& tensor, std::size_t begin, std::size_t end) {
    put_tensor(out, tensor, end - begin);
    for (std::size_t i = begin; i < end; ++i) put_piece(out, whole, pieces[i]);
    pass_on(out, sink);
  });
  out.uint(std::uint64_t{0});  // rank files
  sink(out.bytes());
}

Index decode_index(std::span<const std::byte> bytes, const FileHeader& header,
                   const std::string& path) {
  ByteReader in(bytes, path, header.index_range.begin);
  Index index;
  index.format_version = header.version;
  index.contents.edit().world_size = static_cast<int>(header.world_size);
  get_storage_options(in, index);
  get_values(in, index);
  get_aliases(in, index.contents.edit());
  get_units(in, index.contents.edit());
  get_annotations(in, index);
  get_linked_files(in, index);
  get_tensors(in, header, index);
  get_rank_files(in, header, index);
  if (!in.at_end()) in.fail("end", "no bytes after the last entry", "more bytes");

  // Not checked in a rank file, whose aliases may name tensors that only other ranks have.
  if (header.role == FileRole::index) {
    validate_names(index.contents, ErrorKind::corruption, path);
  }
  validate_storage(index, header, path);
  validate_patches(index, header, path);
  apply_key_order(header, index, path);
  return index;
}

void validate_contents(const CheckpointContents& contents, ErrorKind kind,
                       const std::string& path) {
  const auto fail = [&](const std::string& name, std::string_view rule, std::string_view expected,
                        std::string_view found) {
    throw Error::expected(kind, {.path = path, .fqn = name, .byte_range = {}}, rule, expected,
                          found);
  };
  if (contents.world_size < 1 || contents.world_size > static_cast<int>(kMaxWorldSize)) {
    fail({}, "world size", "1 to " + std::to_string(kMaxWorldSize),
         std::to_string(contents.world_size));
  }
  validate_names(contents, kind, path);
  for (const TensorEntry& tensor : contents.tensors) {
    if (kind != ErrorKind::corruption) validate_meta(tensor.meta, kind, path);
    for (const Piece& piece : tensor.pieces) {
      if (piece.rank < 0 || piece.rank >= contents.world_size) {
        fail(tensor.meta.fqn, "rank", "less than " + std::to_string(contents.world_size),
             std::to_string(piece.rank));
      }
      if (const auto broken = region_error(piece.region, tensor.meta.shape)) {
        throw Error(kind, {.path = path, .fqn = tensor.meta.fqn, .byte_range = {}},
                    "region: " + *broken);
      }
    }
  }
}

tessera::detail::ListOfLists<PieceId> pieces_by_rank(const CheckpointContents& contents) {
  std::vector<std::size_t> num_pieces(static_cast<std::size_t>(contents.world_size));
  for (const TensorEntry& tensor : contents.tensors) {
    for (const Piece& piece : tensor.pieces) ++num_pieces[static_cast<std::size_t>(piece.rank)];
  }
  tessera::detail::ListOfLists<PieceId> ranks;
  ranks.reserve(num_pieces.size(), std::accumulate(num_pieces.begin(), num_pieces.end(), 0UL));
  for (const std::size_t num : num_pieces) ranks.add(num);
  std::vector<std::size_t> next(num_pieces.size());  // of each rank: the next place in its list
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    const SharedVector<Piece>& pieces = contents.tensors[t].pieces;
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      const auto rank = static_cast<std::size_t>(pieces[p].rank);
      ranks[rank][next[rank]++] = {t, p};
    }
  }
  return ranks;
}

Index select_pieces(const Index& whole, std::span<const PieceId> pieces) {
  Index selected = without_tensors(whole);
  std::vector<TensorEntry>& tensors = selected.contents.edit().tensors;
  for (std::size_t t = 0; t < whole.contents->tensors.size(); ++t) {
    const TensorEntry& tensor = whole.contents->tensors[t];
    std::size_t num_here = 0;
    while (num_here < pieces.size() && pieces[num_here].tensor_index == t) ++num_here;
    if (num_here == 0 && !tensor.pieces.empty()) continue;
    TensorEntry& entry = tensors.emplace_back(without_pieces(tensor));
    selected.storage.add(num_here);
    for (std::size_t i = 0; i < num_here; ++i) {
      const PieceId id = pieces[i];
      entry.pieces.push_back(tensor.pieces[id.piece_index]);
      StoredPiece stored = whole.stored(id);
      stored.position = id.piece_index;
      selected.storage.set({tensors.size() - 1, i}, stored);
      if (!whole.linked_places.empty()) selected.linked_places.push_back(whole.linked_place(id));
      if (const StoredPatch* const patch = whole.patch(id)) {
        selected.patches.emplace(PieceId(tensors.size() - 1, i), *patch);
      }
    }
    pieces = pieces.subspan(num_here);
  }
  return selected;
}

void take_storage(Index& whole, std::span<const PieceId> pieces, const Index& rank_index) {
  auto id = pieces.begin();
  for (std::size_t t = 0; t < rank_index.storage.num_tensors(); ++t) {
    for (std::size_t p = 0; p < rank_index.storage.num_pieces(t); ++p) {
      if (const StoredPatch* const patch = rank_index.patch({t, p})) whole.patches[*id] = *patch;
      whole.storage.set(*id++, rank_index.stored({t, p}));
    }
  }
}

namespace {

/// A tensor of one rank's index.
struct RankTensor {
  const Index* index;
  std::size_t tensor_index;

  const TensorEntry& entry() const { return index->contents->tensors[tensor_index]; }
};

/// Returns the tensors of all ranks, sorted by fqn and then by rank.
std::vector<RankTensor> tensors_by_fqn(const std::vector<Index>& ranks) {
  std::vector<RankTensor> tensors;
  for (const Index& rank : ranks) {
    for (std::size_t t = 0; t < rank.contents->tensors.size(); ++t) tensors.push_back({&rank, t});
  }
  std::ranges::stable_sort(tensors, {}, [](const RankTensor& tensor) -> const std::string& {
    return tensor.entry().meta.fqn;
  });
  return tensors;
}

/// Merges the entries `by_rank` that rank files have for one tensor, puts each piece at its
/// StoredPiece::position, and adds the tensor to `whole`.
void merge_tensor(Index& whole, std::span<const RankTensor> by_rank, PiecePool& pool,
                  const std::string& path) {
  TensorEntry tensor = without_pieces(by_rank.front().entry());
  const auto fail = [&](std::string_view rule, std::string_view expected, std::string_view found) {
    throw Error::expected(ErrorKind::corruption,
                          {.path = path, .fqn = tensor.meta.fqn, .byte_range = {}}, rule, expected,
                          found, "rank files of different checkpoints?");
  };
  std::size_t num_pieces = 0;
  for (const RankTensor& each : by_rank) num_pieces += each.entry().pieces.size();
  std::vector<Piece> pieces(num_pieces);
  const std::size_t tensor_index = whole.storage.num_tensors();
  whole.storage.add(num_pieces);
  if (!whole.linked_files.empty()) whole.linked_places.resize(whole.storage.num_pieces());
  std::vector<bool> is_placed(num_pieces, false);
  for (const RankTensor& each : by_rank) {
    if (each.entry().meta != tensor.meta) {
      fail("ranks", "the same dtype and shape on every rank", "other dtypes or shapes");
    }
    for (std::size_t p = 0; p < each.entry().pieces.size(); ++p) {
      const PieceId in_rank{each.tensor_index, p};
      const StoredPiece stored = each.index->stored(in_rank);
      if (stored.position >= num_pieces || is_placed[stored.position]) {
        fail("pieces", "positions 0 to " + std::to_string(num_pieces - 1),
             std::to_string(stored.position));
      }
      is_placed[stored.position] = true;
      pieces[stored.position] = each.entry().pieces[p];
      const PieceId id{tensor_index, stored.position};
      whole.storage.set(id, stored);
      if (!whole.linked_files.empty()) {
        whole.linked_places[whole.storage.number_of(id)] = each.index->linked_place(in_rank);
      }
      if (const StoredPatch* const patch = each.index->patch(in_rank)) {
        whole.patches.emplace(id, *patch);
      }
    }
  }
  tensor.pieces = pool.share(std::move(pieces));
  whole.contents.edit().tensors.push_back(std::move(tensor));
}

}  // namespace

Index merge_ranks(std::vector<Index> ranks, const std::string& path) {
  TESSERA_CHECK(!ranks.empty());
  const std::vector<RankTensor> tensors = tensors_by_fqn(ranks);
  Index whole = without_tensors(ranks.front());
  PiecePool pool;
  for (std::span<const RankTensor> rest = tensors; !rest.empty();) {
    const auto num_parts = static_cast<std::size_t>(
        std::ranges::find_if(rest,
                             [&](const RankTensor& tensor) {
                               return tensor.entry().meta.fqn != rest.front().entry().meta.fqn;
                             }) -
        rest.begin());
    merge_tensor(whole, rest.first(num_parts), pool, path);
    rest = rest.subspan(num_parts);
  }
  validate_contents(whole.contents, ErrorKind::corruption, path);
  return whole;
}

}  // namespace tessera::formats::native
