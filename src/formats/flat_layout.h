#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/flat_unit.h"

namespace tessera::formats {

/// The parameters in a flat vector of a checkpoint, and the place of each parameter. FSDP1 writes
/// such vectors (LOCAL_STATE_DICT) without this information. Units: elements; offsets count within
/// the vector, which may have gaps for alignment and padding at the end.
struct FlatVectorLayout {
  std::string key;  // the vector's fqn in the checkpoint
  DType dtype = DType::float32;
  std::int64_t numel_padded = 0;  // the length of the whole vector
  std::vector<FlatUnitParameter> parameters;
  friend bool operator==(const FlatVectorLayout&, const FlatVectorLayout&) = default;
};

/// Reads a flat layout as docs/examples/write_flat_layout.py writes it:
/// `{"schema":1,"units":[{"key":…,"dtype":…,"numel_padded":N,"params":[{"fqn":…,"shape":[…],
/// "offset":N}]}]}`.
/// Throws: Error(corruption) if the file has another form, or if parameters reach beyond their
/// vector or overlap (parameters with exactly the same elements are tied, and allowed);
/// Error(not_found), Error(io).
std::vector<FlatVectorLayout> read_flat_layout(const FileSystem& fs, const std::string& path);

/// Returns a reader that shows each vector of `reader` as its parameters. Each parameter becomes
/// a tensor. For each piece of the vector that holds elements of the parameter, the parameter
/// has a piece. The optimizer state of a vector (`….state.<vector>.<name>`, where `<vector>` may
/// lack its first components) becomes state of each parameter: state of the vector's length is
/// cut in the same way; state without dimensions, and state that is a value, is repeated. In the
/// lists of parameter groups, the names of parameters replace the vector's name. If a name there
/// can be that of two vectors, read_value throws Error(mismatch) for the list. Tied parameters
/// become aliases; the optimizer has only the first name. If the checkpoint has no tensor
/// `<key>`, but exactly one `<word>.<key>`, this vector and its parameters get the prefix
/// `<word>.`.
/// `contents().units` gets a flat unit for each vector. All else is unchanged. Throws:
/// Error(mismatch) if a vector is missing or has another dtype or length, if its state has another
/// length, if state may be that of two vectors or of none, if a name occurs twice, or if the layout
/// leaves out elements.
std::unique_ptr<CheckpointReader> apply_flat_layout(std::unique_ptr<CheckpointReader> reader,
                                                    const std::vector<FlatVectorLayout>& layout);

}  // namespace tessera::formats
