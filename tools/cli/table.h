#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/terminal.h"

namespace tessera::cli {

/// A table of text: rows of cells in aligned columns, two spaces apart, without trailing spaces. If
/// a terminal is too narrow, narrow columns replace wide ones (let_alternate), then the front of
/// one column is cut (let_shrink). Elsewhere, everything is printed in full.
class Table {
 public:
  enum class Align { left, right };
  struct Cell {
    std::string text;
    Style style = Style::plain;
    /// Whether the text may use the rest of the line, and so does not widen its column.
    enum class Extent : std::uint8_t { one_column, rest_of_line } extent = Extent::one_column;
  };

  explicit Table(std::vector<Align> columns) : columns_(std::move(columns)) {}

  /// Names the column that is cut if the terminal is too narrow.
  void let_shrink(std::size_t column) { shrinking_ = column; }
  /// Declares columns with the same content: shows those in `wide` if there is room, else `narrow`.
  void let_alternate(std::vector<std::size_t> wide, std::size_t narrow) {
    alternates_.push_back({std::move(wide), narrow});
  }
  /// Reserves memory for rows that will be added. Units of `text_nbytes`: bytes in all rows.
  void reserve(std::size_t num_rows, std::size_t text_nbytes);
  /// Adds a row, which may have fewer cells than there are columns.
  void add_row(std::span<const Cell> cells);
  void add_row(std::initializer_list<Cell> cells) {
    add_row(std::span(cells.begin(), cells.end()));
  }
  bool empty() const { return row_ends_.empty(); }
  void print(Terminal& terminal) const;

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  struct Alternates {
    std::vector<std::size_t> wide;
    std::size_t narrow;
  };

  // A cell whose text is a section of one string with the texts of all cells.
  struct StoredCell {
    std::size_t text_end;
    std::uint32_t width;
    Style style;
    Cell::Extent extent;
  };

  /// Appends a row to `line`.
  void lay_out_row(std::size_t row, const std::vector<std::size_t>& widths,
                   const std::vector<bool>& is_shown, const Terminal& terminal,
                   std::string& line) const;
  std::string_view text_of(std::size_t cell) const;

  std::vector<Align> columns_;
  std::size_t shrinking_ = kNone;
  std::vector<Alternates> alternates_;
  std::string texts_;
  std::vector<StoredCell> cells_;
  std::vector<std::size_t> row_ends_;  // cells before the end of each row
};

}  // namespace tessera::cli
