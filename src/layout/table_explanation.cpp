#include <algorithm>
#include <array>

#include "base/json.h"
#include "base/size_text.h"
#include "layout/table_reasons.h"
#include "tessera/base/error.h"
#include "tessera/layout/table_planner.h"

namespace tessera {
namespace {

constexpr std::size_t kGap = 2;
constexpr std::size_t kMostRanksColumns = 24;
constexpr std::size_t kReasonIndent = 4;
constexpr std::size_t kLeastNameColumns = 16;

/// Returns whether a UTF-8 byte begins a character.
bool begins_column(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
}

std::size_t columns_of(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), begins_column));
}

/// Returns the text. If it is wider than `max_width`, returns `…` and its last characters.
/// Requires: `max_width > 0`.
std::string without_beginning(const std::string& text, std::size_t max_width) {
  const std::size_t width = columns_of(text);
  if (width <= max_width) return text;
  const std::size_t num_left_out = width - (max_width - 1);
  std::size_t begin = 0;
  for (std::size_t passed = 0; begin < text.size(); ++begin) {
    if (begins_column(text[begin]) && passed++ == num_left_out) break;
  }
  return "…" + text.substr(begin);
}

/// Returns `2`, `[0:4]` or `[2, 0, 5:7]`. If this text is long, returns the number of ranks
/// instead.
std::string ranks_text(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return std::to_string(ranks.front());
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[i]);
    if (end - i > 1) text += ":" + std::to_string(ranks[end - 1] + 1);
    i = end;
  }
  if (text.size() > kMostRanksColumns) return std::to_string(ranks.size()) + " ranks";
  return "[" + text + "]";
}

enum class Align { left, right };

template <std::size_t N>
class TextTable {
 public:
  explicit TextTable(std::array<Align, N> columns) : columns_(columns) {}

  void add_row(std::array<std::string, N> cells, std::string note) {
    for (std::size_t c = 0; c < N; ++c) widths_[c] = std::max(widths_[c], columns_of(cells[c]));
    rows_.push_back({std::move(cells), std::move(note)});
  }

  /// Returns the table as text. If lines would be longer than `max_width` (0: no limit), notes go
  /// below their rows. If that is not enough, texts in the first column lose their beginning.
  std::string text(std::size_t max_width) const {
    std::size_t own_width = 0;
    for (const std::size_t width : widths_) own_width += width + kGap;
    std::size_t note_width = 0;
    for (const Row& row : rows_) note_width = std::max(note_width, columns_of(row.note));
    const bool are_notes_below = max_width > 0 && own_width + note_width > max_width;
    std::array<std::size_t, N> widths = widths_;
    if (max_width > 0 && own_width - kGap > max_width) {
      const std::size_t excess = own_width - kGap - max_width;
      const std::size_t least = std::min(widths[0], kLeastNameColumns);
      widths[0] = std::max(widths[0] - std::min(widths[0], excess), least);
    }
    std::string text;
    for (const Row& row : rows_) {
      std::string line = line_of(row, widths);
      if (!are_notes_below) line += row.note;
      line.erase(line.find_last_not_of(' ') + 1);
      text += line + "\n";
      if (are_notes_below && &row != &rows_.front()) {
        text += std::string(kReasonIndent, ' ') + row.note + "\n";
      }
    }
    return text;
  }

 private:
  struct Row {
    std::array<std::string, N> cells;
    std::string note;
  };

  std::string line_of(const Row& row, const std::array<std::size_t, N>& widths) const {
    std::string line;
    for (std::size_t c = 0; c < N; ++c) {
      const std::string cell = without_beginning(row.cells[c], widths[c]);
      const std::string padding(widths[c] - columns_of(cell), ' ');
      line += columns_[c] == Align::left ? cell + padding : padding + cell;
      line.append(kGap, ' ');
    }
    return line;
  }

  std::array<Align, N> columns_;
  std::array<std::size_t, N> widths_{};
  std::vector<Row> rows_;
};

std::string percent_text(std::uint64_t nbytes, std::uint64_t total) {
  if (total == 0) return "0 %";
  const double share = static_cast<double>(nbytes) / static_cast<double>(total);
  return std::to_string(static_cast<int>(share * 100)) + " %";
}

template <class Item, class Write>
std::string json_list(const std::vector<Item>& items, Write write) {
  std::string text;
  for (const Item& item : items) text += (text.empty() ? "\n  " : ",\n  ") + write(item);
  return "[" + text + (items.empty() ? "]" : "\n ]");
}

std::string json_number(double number) {
  return value_to_json(Value(number));
}

std::string shard_to_json(const PlannedShard& shard) {
  return "{\"rank\": " + std::to_string(shard.rank) +
         ", \"nbytes\": " + std::to_string(shard.nbytes) +
         ", \"seconds\": " + json_number(shard.seconds) + "}";
}

std::string table_to_json(const PlannedTable& table) {
  std::string shards;
  for (const PlannedShard& shard : table.shards) {
    shards += (shards.empty() ? "" : ", ") + shard_to_json(shard);
  }
  return "{\"name\": " + json_quote(table.name) +
         ", \"sharding\": " + json_quote(table_sharding_name(table.rule.sharding)) +
         ", \"shards\": [" + shards + "], \"reason\": " + json_quote(table.reason) + "}";
}

}  // namespace

std::string ProposedPlan::to_text(std::size_t max_width) const {
  using enum Align;
  TextTable<5> of_tables({left, left, left, right, right});
  of_tables.add_row({"table", "sharding", "ranks", "bytes", "time"}, "why");
  for (const PlannedTable& table : tables) {
    PlannedShard largest;
    if (!table.shards.empty()) largest = table.shards.front();
    of_tables.add_row(
        {printable(table.name, 4 * table.name.size()),
         std::string(table_sharding_name(table.rule.sharding)), ranks_text(table.rule.ranks),
         iec_size(largest.nbytes), duration_text(largest.seconds)},
        table.reason);
  }
  TextTable<4> of_ranks({right, right, right, right});
  of_ranks.add_row({"rank", "bytes", "full", "time"}, "");
  double slowest_seconds = 0;
  double total_seconds = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    of_ranks.add_row(
        {std::to_string(r), iec_size(ranks[r].nbytes),
         percent_text(ranks[r].nbytes, memory_per_rank_nbytes), duration_text(ranks[r].seconds)},
        "");
    slowest_seconds = std::max(slowest_seconds, ranks[r].seconds);
    total_seconds += ranks[r].seconds;
  }
  return of_tables.text(max_width) + "\n" + of_ranks.text(0) + "\n" + "slowest rank " +
         duration_text(slowest_seconds) + ", mean " +
         duration_text(total_seconds /
                       static_cast<double>(std::max<std::size_t>(ranks.size(), 1))) +
         "; " + iec_size(memory_per_rank_nbytes) + " per rank, of which " +
         iec_size(common_nbytes) + " are not for tables\n";
}

std::string ProposedPlan::to_json() const {
  std::string plan_json = plan.to_json();
  plan_json.erase(plan_json.find_last_not_of('\n') + 1);
  std::size_t rank_number = 0;
  const auto rank_to_json = [&](const PlannedRank& rank) {
    return shard_to_json({static_cast<int>(rank_number++), rank.nbytes, rank.seconds});
  };
  return "{\"schema\": 1,\n \"memory_per_rank_nbytes\": " + std::to_string(memory_per_rank_nbytes) +
         ",\n \"common_nbytes\": " + std::to_string(common_nbytes) +
         ",\n \"tables\": " + json_list(tables, table_to_json) +
         ",\n \"ranks\": " + json_list(ranks, rank_to_json) + ",\n \"plan\": " + plan_json + "}\n";
}

}  // namespace tessera
