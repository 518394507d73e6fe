"""Checks that links in the pages have a target, and that every public symbol has a comment."""

import shutil
import tempfile
import textwrap
import unittest
from pathlib import Path

import modules  # noqa: F401
import docs
import markdown_pages
import places


def page(text: str) -> str:
    return textwrap.dedent(text).lstrip()


class MarkdownPagesTest(unittest.TestCase):
    def test_anchors_are_those_of_the_place_where_pages_are_shown(self):
        text = page("""
            # `fully_shard`, and why
            ## A [link](x.md), *twice*
            ## Same
            ## Same
            ```
            # no heading
            ```
            <a id="by-hand"></a>
            """)
        self.assertEqual(markdown_pages.anchors(text),
                         {"fully_shard-and-why", "a-link-twice", "same", "same-1", "by-hand"})

    def test_links_in_code_are_none(self):
        text = page("""
            [a](a.md) and `[b](b.md)`, [`c[0]`](c.md#d), [over two
            lines](e.md) ![image](f.png)

                [g](g.md)

            ```cpp
            [h](h.md)
            ```
            [i]: i.md
            <a href="j.md">j</a>
            """)
        self.assertEqual(sorted((link.target, link.line) for link in markdown_pages.links(text)),
                         [("a.md", 1), ("c.md#d", 1), ("e.md", 1), ("f.png", 2), ("i.md", 9), ("j.md", 10)])

    def test_replaced_links_leave_all_else_as_it_is(self):
        text = "`[a](a.md)` [`b`](b.md), [c](c.md#d)\n"
        self.assertEqual(markdown_pages.replace_links(text, lambda text, target: f"<{text}|{target}>"),
                         "`[a](a.md)` <`b`|b.md>, <c|c.md#d>\n")

    def test_images_are_replaced_apart_from_links(self):
        text = "[a](a.md) ![b](b.png) `![c](c.png)`\n"
        self.assertEqual(markdown_pages.replace_links(text, lambda text, target: f"<{text}|{target}>", images=True),
                         "[a](a.md) <b|b.png> `![c](c.png)`\n")

    def test_code_with_an_apostrophe_gets_two_backticks(self):
        self.assertEqual(markdown_pages.double_backticks(page("""
            `--only '!args'`, `plain`, ``it's``, don't, `x.<a's b>`
            ```
            `'in a block'`
            ```
            """)), page("""
            ``--only '!args'``, `plain`, ``it's``, don't, ``x.<a's b>``
            ```
            `'in a block'`
            ```
            """))

    def test_links_that_lead_nowhere_are_told_with_page_and_line(self):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "docs").mkdir()
            (root / "docs/other.md").write_text("# Other\n## There\n")
            (root / "page.md").write_text(page("""
                # Page
                [fine](docs/other.md#there), [fine](#page), [fine](docs), [elsewhere](https://example.org/#x)
                [gone](docs/gone.md)
                [no heading](docs/other.md#here)
                [outside](../page.md)
                """))
            self.assertEqual(markdown_pages.broken_links(root), [
                "page.md:3: docs/gone.md: no such file",
                "page.md:4: docs/other.md#here: no such heading in docs/other.md",
                "page.md:5: ../page.md: expected a path within the tree"])

    def test_no_link_of_this_tree_is_broken(self):
        self.assertEqual(markdown_pages.broken_links(places.ROOT), [])


class ReferenceTest(unittest.TestCase):
    def test_headers_are_prepared_line_for_line(self):
        header = page("""
            /// Returns `a.b` of it. Shape: any. Throws: Error(io) where it
            /// fails.
            int a();  // of this
                      // rank
            // nothing
            """)
        self.assertEqual(docs.prepared_header(header), page("""
            /// @brief Returns `a.b` of it. @details @label{Shape} any. @label{Throws} Error(io) where it
            /// fails.
            int a();  /**< @brief of this
                      rank */
            // nothing
            """))

    def test_friends_are_left_out_with_their_bodies(self):
        header = page("""
            class A {
              friend class B;
              friend bool operator==(const A& a, const A& b) {
                if (a.c == b.c) return true;
                return false;
              }
             private:
              int c;
            };
            """)
        self.assertEqual(docs.prepared_header(header), page("""
            class A {





             private:
              int c;
            };
            """))

    def test_members_of_private_classes_need_no_comment(self):
        for prot, expected in (("private", []), ("public", ["include/a.h:1: A::B: expected a comment, found none",
                                                            "include/a.h:1: A::B::f: expected a comment, found none"])):
            with self.subTest(prot), tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "a.h").write_text("void f();\n")
                (Path(folder) / "structA_1_1B.xml").write_text(page(f"""
                    <doxygen><compounddef kind="struct" prot="{prot}"><compoundname>A::B</compoundname>
                    <memberdef kind="function" prot="public"><name>f</name><location file="a.h" line="1"/></memberdef>
                    <location file="a.h" line="1"/></compounddef></doxygen>
                    """))
                self.assertEqual(docs.undescribed(Path(folder), Path(folder)), expected)

    @unittest.skipUnless(shutil.which("doxygen"), "needs doxygen")
    def test_every_public_symbol_has_a_comment(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(docs.check_reference(Path(folder) / "docs", html=False), [])


if __name__ == "__main__":
    unittest.main()
