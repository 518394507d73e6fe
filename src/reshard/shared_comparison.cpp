#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "formats/staging/shared_work.h"
#include "reshard/equal_pieces_text.h"
#include "reshard/execute_blocks.h"
#include "tessera/base/error.h"
#include "tessera/reshard/base_comparison.h"

namespace tessera::reshard {
namespace {

using formats::PiecePair;
using formats::SharedWork;

constexpr std::chrono::milliseconds kPollInterval{50};
constexpr std::uint64_t kMaxTextNbytes = std::uint64_t{1} << 30;

/// Returns a digest of all that decides which pieces are equal.
std::string digest_of(const formats::ResumeIdentity& identity, const formats::BaseCheckpoint& base,
                      RowChanges row_changes) {
  Sha256 digest;
  const auto add = [&](const std::string& text) {
    digest.update(std::as_bytes(std::span(text)));
    digest.update(std::as_bytes(std::span("\n", 1)));
  };
  for (const auto& [name, text] : identity) {
    add(name);
    add(text);
  }
  add(base.identity());
  if (row_changes == RowChanges::write_rows) add("changed rows");
  return digest.hex_digest();
}

/// The comparison with a base by several workers, as one of them sees it ([Note: Shared work]).
class SharedComparison {
 public:
  SharedComparison(const Plan& plan, const formats::TensorSource& source,
                   const formats::BaseCheckpoint& base, RowChanges row_changes, std::string digest,
                   const ComparisonShare& share, const ExecuteOptions& options,
                   const ComparisonBegins& begins, SharedWork& work)
      : plan_(plan),
        source_(source),
        base_(base),
        row_changes_(row_changes),
        digest_(std::move(digest) + "\n"),
        share_(share),
        options_(options),
        begins_(begins),
        work_(work),
        pairs_(formats::pair_pieces(plan.destination, base.reader().contents())) {}

  /// Compares shares until all are compared. Returns the equal pieces of all shares.
  formats::PieceMatches run() {
    std::vector<std::string> texts;
    std::vector<bool> is_done(static_cast<std::size_t>(share_.num_shares));
    while (static_cast<int>(texts.size()) < share_.num_shares) {
      const std::size_t num_before = texts.size();
      for (int step = 0; step < share_.num_shares; ++step) {
        const int share = (share_.index + step) % share_.num_shares;
        if (is_done[static_cast<std::size_t>(share)]) continue;
        auto text = find_or_compare(share);
        if (!text) continue;
        texts.push_back(*std::move(text));
        is_done[static_cast<std::size_t>(share)] = true;
      }
      if (options_.stop.stop_requested()) throw Error(ErrorKind::interrupted, {}, "interrupted");
      if (texts.size() == num_before) std::this_thread::sleep_for(kPollInterval);
    }
    return equal_pieces_from_texts(base_, plan_.destination, pairs_, texts, work_.path());
  }

 private:
  /// Reads a share's text of equal pairs, or makes it. Nothing while another worker makes it.
  std::optional<std::string> find_or_compare(int share) {
    if (auto text = read(share)) return text;
    const auto lock = work_.try_lock_comparison(share);
    if (!lock) return std::nullopt;
    if (auto text = read(share)) return text;  // written before the lock was free
    const formats::PieceMatches matches = find_equal_pieces_of(
        plan_, source_, base_, pairs_of(share), row_changes_, options_, begins_);
    std::string text = equal_pieces_to_text(base_, pairs_, matches, RowsInText::say);
    work_.write_comparison(share, digest_ + text);
    return text;
  }

  /// Returns the text that a worker of the same move has written for a share.
  std::optional<std::string> read(int share) const {
    std::optional<std::string> text = work_.read_comparison(share, kMaxTextNbytes);
    if (text && text->size() >= kMaxTextNbytes) {
      throw Error::expected(ErrorKind::unsupported, {.path = work_.path()},
                            "result of a worker's comparison with the base",
                            "less than " + std::to_string(kMaxTextNbytes) + " bytes", "more");
    }
    if (!text || !text->starts_with(digest_)) return std::nullopt;
    return text->substr(digest_.size());
  }

  /// Returns the pairs of a share: a range of about equal bytes.
  std::vector<PiecePair> pairs_of(int share) const {
    std::uint64_t total = 0;
    for (const PiecePair& pair : pairs_) total += nbytes_of_pair(pair);
    const auto num_shares = static_cast<std::uint64_t>(share_.num_shares);
    const std::uint64_t nbytes_of_share = total / num_shares + (total % num_shares != 0 ? 1 : 0);
    std::vector<PiecePair> own;
    std::uint64_t before = 0;
    for (const PiecePair& pair : pairs_) {
      if (before / nbytes_of_share == static_cast<std::uint64_t>(share)) own.push_back(pair);
      before += nbytes_of_pair(pair);
    }
    return own;
  }

  std::uint64_t nbytes_of_pair(const PiecePair& pair) const {
    const auto& tensor = plan_.destination.tensors[pair.piece.tensor_index];
    return nbytes_of(tensor.pieces[pair.piece.piece_index].region, tensor.meta.dtype);
  }

  const Plan& plan_;
  const formats::TensorSource& source_;
  const formats::BaseCheckpoint& base_;
  const RowChanges row_changes_;
  const std::string digest_;  // the first line of each text
  const ComparisonShare share_;
  const ExecuteOptions& options_;
  const ComparisonBegins& begins_;
  SharedWork& work_;
  const std::vector<PiecePair> pairs_;
};

}  // namespace

std::uint64_t link_to_base_with_others(const Plan& plan, const formats::CheckpointReader& reader,
                                       FileSystem& fs, const std::string& base,
                                       const std::string& destination, RowChanges row_changes,
                                       formats::CreateOptions& create, const ComparisonShare& share,
                                       const ExecuteOptions& options,
                                       const ComparisonBegins& begins) {
  TESSERA_CHECK(0 <= share.index && share.index < share.num_shares && create.journal.has_value());
  const auto opened = open_base_of_move(fs, base, destination, create);
  add_base_to_identity(*opened, row_changes, create);
  formats::CreateOptions described = create;
  prepare_move(plan, reader, described, options.source_files);
  SharedWork work(fs, destination);
  work.lock(options.stop);  // makes the folder
  formats::PieceMatches matches =
      SharedComparison(plan, reader, *opened, row_changes,
                       digest_of(described.journal->identity, *opened, row_changes), share, options,
                       begins, work)
          .run();
  create.native.linked = formats::link_pieces(opened, plan.destination, std::move(matches));
  return create.native.linked ? create.native.linked->nbytes : 0;
}

}  // namespace tessera::reshard
