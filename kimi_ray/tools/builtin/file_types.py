"""Kinds of files by the names that search programs give them: what Grep's ``type`` means."""

from __future__ import annotations

import difflib

from kimi_ray.errors import ToolError

_PATTERNS: dict[str, tuple[str, ...]] = {
    "c": ("*.c", "*.h"),
    "cmake": ("*.cmake", "CMakeLists.txt"),
    "cpp": ("*.cpp", "*.cc", "*.cxx", "*.hpp", "*.hh", "*.hxx", "*.h", "*.inl"),
    "cs": ("*.cs",),
    "css": ("*.css", "*.scss", "*.sass", "*.less"),
    "csv": ("*.csv", "*.tsv"),
    "dart": ("*.dart",),
    "docker": ("Dockerfile", "Dockerfile.*", "*.dockerfile"),
    "elixir": ("*.ex", "*.exs"),
    "erlang": ("*.erl", "*.hrl"),
    "go": ("*.go",),
    "graphql": ("*.graphql", "*.gql"),
    "haskell": ("*.hs", "*.lhs"),
    "html": ("*.html", "*.htm"),
    "java": ("*.java",),
    "js": ("*.js", "*.jsx", "*.mjs", "*.cjs"),
    "json": ("*.json", "*.jsonl"),
    "julia": ("*.jl",),
    "kotlin": ("*.kt", "*.kts"),
    "lua": ("*.lua",),
    "make": ("Makefile", "makefile", "GNUmakefile", "*.mk"),
    "markdown": ("*.md", "*.markdown", "*.mdx"),
    "ocaml": ("*.ml", "*.mli"),
    "perl": ("*.pl", "*.pm"),
    "php": ("*.php",),
    "proto": ("*.proto",),
    "py": ("*.py", "*.pyi"),
    "r": ("*.r", "*.R", "*.Rmd"),
    "ruby": ("*.rb", "Gemfile", "Rakefile"),
    "rust": ("*.rs",),
    "scala": ("*.scala", "*.sbt"),
    "sh": ("*.sh", "*.bash", "*.zsh"),
    "sql": ("*.sql",),
    "svelte": ("*.svelte",),
    "swift": ("*.swift",),
    "tex": ("*.tex", "*.bib", "*.sty"),
    "toml": ("*.toml",),
    "ts": ("*.ts", "*.tsx", "*.mts", "*.cts"),
    "txt": ("*.txt",),
    "vue": ("*.vue",),
    "xml": ("*.xml", "*.xsd", "*.svg"),
    "yaml": ("*.yaml", "*.yml"),
    "zig": ("*.zig",),
}
_ALIASES = {
    "bash": "sh",
    "csharp": "cs",
    "javascript": "js",
    "jsx": "js",
    "md": "markdown",
    "python": "py",
    "rb": "ruby",
    "rs": "rust",
    "shell": "sh",
    "tsx": "ts",
    "typescript": "ts",
    "yml": "yaml",
}


def patterns_of(file_type: str) -> tuple[str, ...]:
    """The file name patterns of a kind of files.

    Raises:
        ToolError: ``tool.bad_pattern``, with near names in the hint.
    """
    name = file_type.lower().lstrip(".")
    found = _PATTERNS.get(_ALIASES.get(name, name))
    if found is None:
        near = difflib.get_close_matches(name, [*_PATTERNS, *_ALIASES], n=3)
        raise ToolError(
            f"there is no file type {file_type[:40]!r}",
            code="tool.bad_pattern",
            hint=f"did you mean {' or '.join(near)}?" if near else "use glob instead, such as *.ext",
        )
    return found
