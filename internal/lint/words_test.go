// This file owns the words that must not be in the tree. Each pattern has one letter in
// brackets, so that it does not match itself.

package lint

import (
	"bytes"
	"fmt"
	"path"
	"regexp"
	"testing"
)

var forbidden = []struct {
	pattern *regexp.Regexp
	why     string
}{
	{regexp.MustCompile(`\b(TO[D]O|FIX[M]E|XX[X]|HA[C]K)\b`), "marks unfinished work; finish it, or open an issue"},
	{regexp.MustCompile(`(?i)\bnot (yet )?imple[m]ented\b|\bplace[h]older\b|\bunimple[m]ented\b`), "marks unfinished work; finish it, or say what the user can do instead"},
	{regexp.MustCompile(`(?m)(^|[^\w./-])/(wor[k]|hom[e]|roo[t]|Use[r]s)/[\w.]`), "is a path of one machine"},
	{regexp.MustCompile(`(?m)(^|[^\w])\.(librar[y]|mirro[r]|devic[e])/`), "is a folder of one machine"},
	{regexp.MustCompile(`(?m)^(<{7}|={7}|>{7}|\|{7})( |$)`), "is left over from a merge"},
}

// checkWords complains about forbidden words.
func checkWords(files []*file) (complaints []string) {
	for _, f := range files {
		if path.Ext(f.name) == ".ptx" {
			continue // written by the compiler
		}
		for _, bad := range forbidden {
			for _, at := range bad.pattern.FindAllIndex(f.text, -1) {
				found := f.text[at[0]:at[1]]
				line := 1 + bytes.Count(f.text[:at[1]-1], []byte("\n"))
				complaints = append(complaints, fmt.Sprintf("%s:%d: %q %s", f.name, line, bytes.TrimSpace(found), bad.why))
			}
		}
	}
	return complaints
}

func TestWords(t *testing.T) { complain(t, checkWords(repo(t))) }

// The planted words are assembled here, so that the rule does not find them in this file.
func TestWordsPlanted(t *testing.T) {
	good := "a.md: to do /workshop/ ./works/x https://example.org/home/x device/cpu place holder ======"
	bad := []string{
		"// TO" + "DO: later",
		"panic(\"not imple" + "mented\")",
		"cat /wor" + "k/main/x",
		"see .librar" + "y/x",
		"<<<<" + "<<< HEAD",
	}
	files := []*file{{name: "good", text: []byte(good)}}
	for i, line := range bad {
		files = append(files, &file{name: fmt.Sprint("bad", i), text: []byte("\n" + line + "\n")})
	}
	mustComplain(t, checkWords(files), "bad0:2", "bad1:2", "bad2:2", "bad3:2", "bad4:2")
}
