// This file owns the comparison of our reading of words with bash.

package megatron

import (
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
)

// Drawn words become the same words of a command as in bash, if there is one.
func TestWordsAsInBash(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("there is no bash")
	}
	r := rand.New(rand.NewPCG(1, 2))
	one := func(of ...string) string { return of[r.IntN(len(of))] }
	array := func() string { return one("A", "B", "C", "N") }
	var word func(deep int) string
	word = func(deep int) string {
		name := one("X", "Y", "E", "U")
		inner := func() string {
			if deep == 0 {
				return one("w", "v u")
			}
			return word(deep - 1)
		}
		switch r.IntN(15) {
		case 0:
			return "${" + one("X", "Y", "E") + "}" // one that is not set stays as it is written
		case 1:
			return "${" + name + one(":-", "-", ":+", "+") + inner() + "}"
		case 2:
			return "${" + array() + "[@]}"
		case 3:
			return `"${` + array() + one("[@]", "[*]") + `}"`
		case 4:
			return "${" + array() + "[@]:-" + inner() + "}"
		case 5:
			return "${" + one("A", "B", "C") + one("[0]", "[1]", "[2]", "[X-2]", "[-1]", "[@]:1", "[@]:0:2", "[@]: -1") + "}"
		case 6:
			return "${#" + one("A[@]", "B[@]", "C[@]", "N[@]", "C[0]", "A[7]", "X", "Y") + "}"
		case 7:
			return one("${Y", "${Q") + one("%b*", "%%b*", "#*b", "##*b", ":1", ":1:2", ": -2", ":9", "^^", "%.x", "/b/z", "//b/z", "/q/z", "//b", "/b/$X", "//b/<${X}>", `//b/"$X"'y'`, "/$P/z", `//"$P"/z`, "%%$P*", "#*${P}", `##*"$P"`, "%$P.x", "%d.$X", "/b/${X/3/4}", "//b/ ", "/b/ x  y", "/b/ $X ", "%% *", `/b/" "`, `/b/"a  b"`, `/"c/b"/d`, `//'c/b'/d`, "////_", `//"/"`, "//b/$X/$P") + "}"
		case 8:
			return "$((" + one("X", "7", "${#A[@]}") + one("+", "*", "-") + one("X", "3") + "))"
		case 9:
			return `"` + one("a $X b", "$Y", "${E}", "${U:-d e}", `\$X`, `a\"b`) + `"`
		case 10:
			w := "${" + one(one("A[@]", "B[@]", "C[@]", "C[*]")+one(":?1", "?1"), one("@", "*", "A[@]", "B[@]", "C[@]", "N[@]", "C[*]", "N[*]", "V[@]")+one(":-1", ":+1", "-1", "+1", ":- 1", ":-", ":+")) + "}"
			return one(w, `"`+w+`"`)
		case 11:
			w := "${" + one("@", "*") + one("", ":1", ":2", ":2:1", ":1:0", ":4", ":9", ": -1", ": -2", ": -3:2", ":(-1)", ":-1", ":+1") + "}"
			return one(w, `"`+w+`"`)
		case 12:
			return one(`'a $X'`, `a\ b`, `''`, `""`)
		default:
			return one("a", "b1", "x.y")
		}
	}
	const given = "X=3\nP=b\nY=abcbd.x\nQ=a_b/c/b\nE=\nA=(1 2 3)\nB=(one)\nC=('a b' c)\nN=()\nV=('')\nset -- p 'q r' s\n"
	var words []string
	script := given + `say() { printf '%d' $#; printf ' <%s>' "$@"; printf '\n'; }` + "\n"
	for range 900 {
		w := ""
		for range 1 + r.IntN(3) {
			w += word(2) + one("", " ")
		}
		words = append(words, w)
		script += "say --a " + w + " --b\n"
	}
	said, err := exec.Command(bash, "-c", script).Output()
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range strings.Split(strings.TrimSuffix(string(said), "\n"), "\n") {
		args, err := parseCommand(given+"python x.py --a "+words[i]+" --b", ParseOptions{})
		if err != nil {
			t.Fatalf("%s: %v", words[i], err)
		}
		list, _ := args["a"].([]string)
		got := fmt.Sprint(len(list)+2) + " <--a>"
		for _, x := range append(list, "--b") {
			got += " <" + x + ">"
		}
		if got != want {
			t.Errorf("%s is %s, and in bash %s", words[i], got, want)
		}
	}
}
