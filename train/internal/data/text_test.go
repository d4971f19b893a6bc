package data

import (
	"bytes"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"
)

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestSample(t *testing.T) {
	text, err := Open("")
	if err != nil {
		t.Fatal(err)
	}
	// The sum is part of what checkpoints keep: another sample ends their runs.
	if text.Len() != 427036 || text.SHA256() != "e43a1c93da208714a6530df6cd3ea21279fb11f04d7c0e15e5d501ef2d7fe288" || text.Name() != SampleName {
		t.Errorf("the sample is %s, %d bytes, %s", text.Name(), text.Len(), text.SHA256())
	}
	if !utf8.Valid(text.bytes) || !bytes.HasPrefix(text.bytes, []byte("THE FIRST BOOK OF OPTICKS")) {
		t.Error("the sample is not Newton's text")
	}
	for _, word := range []string{"Gutenberg", "Transcriber", "http", "licen"} {
		if bytes.Contains(bytes.ToLower(text.bytes), []byte(strings.ToLower(word))) {
			t.Errorf("the sample has the word %s", word)
		}
	}
}

func TestOpenFolder(t *testing.T) {
	dir := t.TempDir()
	put(t, filepath.Join(dir, "b.txt"), "bee ")
	put(t, filepath.Join(dir, "a", "z.txt"), "zed ")
	put(t, filepath.Join(dir, "a.txt"), "ay ")
	put(t, filepath.Join(dir, "empty"), "")
	put(t, filepath.Join(dir, ".hidden"), "hidden ")
	put(t, filepath.Join(dir, ".git", "x"), "hidden")
	outside := filepath.Join(t.TempDir(), "x")
	put(t, outside, "ex ")
	// A file is read once: where it is, or at the first link if it is elsewhere.
	for link, target := range map[string]string{"c.txt": "b.txt", "0.txt": "b.txt", "a/link": "../b.txt", "d.txt": ".hidden", "e.txt": outside, "f.txt": outside, "g.txt": "f.txt"} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, ".pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), ".link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, dir + "/", link} {
		text, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		// A dot comes before a slash.
		if string(text.bytes) != "ay zed bee hidden ex " || text.Name() != path {
			t.Errorf("%s: %q", text.Name(), text.bytes)
		}
	}
	for _, file := range []string{".hidden", "c.txt"} { // what is named is meant
		if text, err := Open(filepath.Join(dir, file)); err != nil || text.Len() == 0 {
			t.Errorf("%s: %v, %v", file, text, err)
		}
	}
}

// A file is read where it is, also if all links to it come before it and it is the last.
func TestLinksBeforeTheirFile(t *testing.T) {
	dir := t.TempDir()
	put(t, filepath.Join(dir, "m"), "em ")
	put(t, filepath.Join(dir, "z"), "zed ")
	for _, link := range []string{"a", "b", "n"} {
		if err := os.Symlink("z", filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if text, err := Open(dir); err != nil || string(text.bytes) != "em zed " {
		t.Errorf("%q, %v", text.bytes, err)
	}
}

func TestOpenRefused(t *testing.T) {
	dir := t.TempDir()
	put(t, filepath.Join(dir, "empty", ".hidden"), "hidden")
	put(t, filepath.Join(dir, "no bytes", "a"), "")
	put(t, filepath.Join(dir, "huge"), "x")
	if err := os.Truncate(filepath.Join(dir, "huge"), maxText+1); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	for folder, target := range map[string]string{"broken": "nowhere", "linked": "..", "itself": "x"} {
		put(t, filepath.Join(dir, folder, "text"), "text")
		if err := os.Symlink(target, filepath.Join(dir, folder, "x")); err != nil {
			t.Fatal(err)
		}
	}
	put(t, filepath.Join(dir, "piped", "text"), "text")
	if err := syscall.Mkfifo(filepath.Join(dir, "piped", "x"), 0o644); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"broken":     "x is a link to nothing: mend it",
		"linked":     "x is a link to a folder, which is not followed",
		"itself":     "x cannot be read: too many levels of symbolic links",
		"piped":      "x is neither a file nor a folder: remove it",
		"missing":    "nothing at",
		"empty":      "no files",
		"no bytes":   "has no text",
		"no bytes/a": "has no text",
		"huge":       "more than 8 GiB",
		"pipe":       "neither a file nor a folder",
		"huge/x":     "not a directory",
	} {
		_, err := Open(filepath.Join(dir, path))
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), filepath.Join(dir, path)) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := Open("/proc/self/status"); err == nil || !strings.Contains(err.Error(), "has text but no size") {
		t.Errorf("a file of the kernel, which may block: %v", err)
	}
	if os.Geteuid() != 0 { // root reads everything
		secret := filepath.Join(dir, "secret", "x")
		put(t, secret, "x")
		if err := os.Chmod(secret, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(filepath.Dir(secret)); !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), secret) {
			t.Errorf("a file without permission: %v", err)
		}
	}
}

// Files that are too large together are refused before any is read.
func TestTextLimit(t *testing.T) {
	half := source{path: "nothing", size: maxText/2 + 1}
	for n, want := range map[int]string{1: "nothing cannot be read", 2: "x has more than 8 GiB"} {
		if _, err := read("x", []source{half, half}[:n]); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%d files: %v", n, err)
		}
	}
}

// What is held out is the end of a text, and nothing of it is trained on.
func TestSplit(t *testing.T) {
	text := NewText("letters", []byte("abcdefghij"))
	for share, want := range map[float64][2]string{0: {"abcdefghij", ""}, 0.05: {"abcdefghij", ""}, 0.1: {"abcdefghi", "j"}, 0.25: {"abcdefgh", "ij"}, 0.99: {"a", "bcdefghij"}} {
		rest, held, err := text.Split(share)
		if err != nil {
			t.Fatal(err)
		}
		got := [2]string{string(rest.bytes), ""}
		if held != nil {
			got[1] = string(held.bytes)
		}
		if got != want {
			t.Errorf("%g held out: %q, want %q", share, got, want)
		}
		if (rest.SHA256() == text.SHA256()) != (held == nil) {
			t.Errorf("%g held out: checksums do not tell", share)
		}
	}
	for _, share := range []float64{-0.1, 1, 2, math.NaN()} {
		if _, _, err := text.Split(share); err == nil {
			t.Errorf("held out %g", share)
		}
	}
}

// A pointer of Git LFS is no text, alone or in a folder.
func TestPointerInTheText(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"a.txt": "some text\n", "b.txt": "version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 7\n", "c.txt": "more text\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := filepath.Join(dir, "b.txt") + " cannot be read: it is a pointer of Git LFS in the place of a file; get the file with git lfs pull"
	for _, path := range []string{dir, filepath.Join(dir, "b.txt")} {
		if _, err := Open(path); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", path, err, want)
		}
	}
	if text, err := Open(filepath.Join(dir, "a.txt")); err != nil || text.Len() != 10 {
		t.Errorf("a file of text: %v", err)
	}
}
