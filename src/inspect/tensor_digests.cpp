#include "inspect/tensor_digests.h"

#include <algorithm>

#include "base/digest.h"
#include "formats/read_announcement.h"
#include "inspect/scan.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::inspect {
namespace {

constexpr std::int64_t kMaxBlockNbytes = std::int64_t{4} << 20;

// Returns the digest of each tensor. `begin(meta)` returns a hash to which the tensor's bytes are
// added; the hash may already cover a text, such as dtype and shape.
template <class Begin>
std::vector<std::string> digest_tensors(const formats::CheckpointReader& reader,
                                        std::span<const std::size_t> tensor_indices,
                                        const ScanOptions& options, Begin begin) {
  std::vector<std::string> digests(tensor_indices.size());
  const auto block_nbytes =
      static_cast<std::uint64_t>(detail::numel_per_read(options, 2, 1, 4096, kMaxBlockNbytes));
  // One tensor is one task, because its digest cannot be computed from digests of blocks. Threads
  // begin with the largest tensors, so that they end at about the same time.
  std::vector<std::size_t> order(tensor_indices.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto nbytes_of = [&](std::size_t i) {
    return reader.contents().tensors.at(tensor_indices[i]).meta.nbytes();
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return nbytes_of(a) > nbytes_of(b); });
  formats::ReadAnnouncement reads(reader);
  for (const std::size_t i : order) reads.add_tensor(tensor_indices[i]);
  const auto announced = reads.announce();
  parallel_for(static_cast<std::int64_t>(order.size()), options.num_threads, options.stop,
               [&](std::int64_t task) {
                 const std::size_t i = order[static_cast<std::size_t>(task)];
                 const TensorReader tensor(reader, tensor_indices[i]);
                 auto hash = begin(tensor.meta());
                 for_each_block(tensor, block_nbytes,
                                [&](FlatRange, std::span<const std::byte> bytes) {
                                  hash.update(bytes);
                                  if (options.progress) options.progress(bytes.size());
                                  detail::throw_if_stopped(options);
                                });
                 digests[i] = hash.hex_digest();
               });
  return digests;
}

}  // namespace

std::vector<std::string> compute_digests(const formats::CheckpointReader& reader,
                                         std::span<const std::size_t> tensor_indices,
                                         const ScanOptions& options) {
  return digest_tensors(reader, tensor_indices, options,
                        [](const TensorMeta&) { return Sha256(); });
}

std::vector<std::string> compute_content_digests(const formats::CheckpointReader& reader,
                                                 std::span<const std::size_t> tensor_indices,
                                                 const ScanOptions& options) {
  return digest_tensors(reader, tensor_indices, options, [](const TensorMeta& meta) {
    const std::string header =
        std::string(dtype_name(meta.dtype)) + " " + shape_to_string(meta.shape) + "\n";
    Xxh3Wide hash;
    hash.update(std::as_bytes(std::span(header)));
    return hash;
  });
}

}  // namespace tessera::inspect
