// This file owns the comparison of our reading of words with bash.

package megatron

import (
	"fmt"
	"math/rand/v2"
	"os"
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
		switch r.IntN(22 + deep/2*2) {
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
		case 13: // patterns
			op := one("#", "##", "%", "%%") + one("..", "??", "[a-c]", "[!a-c]*", "[^b]", "*[./]", "[[:alpha:]]", "[]a]", "*b?", "?*", "*", "*.*", `\.x`, `'*'`, `"?"`, "a[b]c", "[a", "*[!x]", "$G", `"$G"`, "a|b", "$'a'", "?(a)", "{a,b}", "é", "*é")
			return one("${Y", "${Q", "${S", "${G", "${L") + op + "}"
		case 14: // patterns in the place of which a text is put
			op := one("/", "//", "/#", "/%") + one("?", "[a-c]", "*", "b*", "*b", "[!.]", "a?", "[[:punct:]]", "'*'", `\*`, "", "$G", `"$G"`, `\/`, "ab", "b") + one("", "/", "/z", "/$X", `/"u v"`, "/'$X'", `/\n`, "/a/b")
			return one("${Y", "${Q", "${S", "${G", "${L", "${E") + op + "}"
		case 15: // parts
			return one("${Y", "${Q", "${S", "${L") + one(":X", ":X-1:2", ":0:X", ":(X-4)", ": -X", ":1:-1", ":0:-2", "::2", ":", ":X>2?1:0", ":$X", ":$((X-2)):1", ": 1 : 2 ") + "}"
		case 16: // letters
			return one("${Y", "${Q", "${S", "${L") + one("^", "^^", ",", ",,", "^^[ab]", "^[b-z]", ",,[A-C]", "^^?", "^^$P", "@U", "@L", "@u") + "}"
		case 17: // of every element
			w := one("${A[@]", "${B[*]", "${C[@]", "${N[@]", "${@", "${*", "${A[1]", "${C[0]", "${A[-1]", "${C[X-2]") + one("%?", "#*[0-9a]", "/[0-9]/k", "//[a-z]", "/#?/<", "^", "^^", ":X-2", "@U", "%%*") + "}"
			return one(w, `"`+w+`"`)
		case 18: // names in variables, indices, lengths
			w := one("${!I}", "${!I%%b*}", "${!I:-d}", "${!J}", "${!J[@]}", "${!A[@]}", "${!C[*]}", "${!N[@]}", "${!1:-d}", "${#L}", "${#A}", "${#C[1]}", "${#@}", "${#*}", "${#C[-1]}", "${A[7]:-d}", "${A[1]:-d}", "${A[7]-d}", "${A[7]:+d}", "${A[1]:+d}", "${N[0]:-${X}}", "${M[k]}", "${M[$K]%?}", "${M[none]:-d}", "${M[none]}", "${Z[5]}", "${Z[1]}")
			return one(w, `"`+w+`"`)
		case 19: // arithmetic
			return one("$((X & 2))", "$((X | 4))", "$((X ^ 1))", "$((~X))", "$((16#ff))", "$((2#101 + X))", "$((1, X))", "$((X > 2 ? 10 : 20))", "$((X++))", "$((++X))", "$((X--))", "$((--X))", "$((X += 1))", "$((X -= 1))", "$((X = 3))", "$((W = X * 2))", "$((0 && (X = 9)))", "$((1 || X++))", "$((X == 3 ? X : (X = 3)))", "$((- -X))", "$((X - -1))", "$((A[1] * 2))", "$((A[X - 2]))", "$((X << 2 | 1))", "$((7 & 3 == 3))", "$((010))", "$((0x1F))", "$[X + 1]", "$((X**2**1))", "$((X >= 3 && X <= 3))", "$((W <<= 1, W))", "$(( ))", "$((X)) $((X %= 7))")
		case 20: // escapes
			return one(`$'a\tb'`, `$'it\'s'`, `$'\x41\102'`, `$'a b'`, `$''`, `$'\\n'`, `$'\u00e9'`, `$"a"`, `"\a\$X"`, `"a'b"`, `"${U:-'a b'}"`, `${U:-'a b'}`, `"${Y%'.x'}"`, `"${Y#"a"}"`, `${U:-"a b"}`, `"${U:-"a b"}"`)
		case 22, 23: // braces, which end ${...} inside of it
			return one("{a,b}", "x{1,2}y", "{1..4}", "{4..1}", "{01..3}", "{a..e..2}", "{1..9..4}", "{a,{b,c}d}", "{}", "{a}", "{a,}", "{a,b", "a,b}", `"{a,b}"`, `{"a,b",c}`, `\{a,b}`, "{1..$X}", "{$X,$P}", "{-1..1}", "{a..}", "{a,b}{1,2}", "${X}{a,b}", "{x,'y z'}", "{A..C}", "{1..3}.{x,y}", "{a,b}}", "{{a,b}")
		default:
			return one("a", "b1", "x.y")
		}
	}
	const given = "X=3\nP=b\nY=abcbd.x\nQ=a_b/c/b\nE=\nA=(1 2 3)\nB=(one)\nC=('a b' c)\nN=()\nV=('')\nS='a *b/c? [d]'\nG='b*'\nL=aéÉb\nI=Y\nJ='C[0]'\nK=k\nW=1\ndeclare -A M=([k]=v1 ['k 2']=w)\nZ[5]=five\nset -- p 'q r' s\n"
	var words []string
	script := given + `say() { printf '%d' $#; printf ' <%s>' "$@"; printf '\n'; }` + "\n"
	for range 1800 {
		w := ""
		for range 1 + r.IntN(3) {
			w += word(2) + one("", " ")
		}
		words = append(words, w)
		script += "(eval 'say --a " + strings.ReplaceAll(w, "'", `'\''`) + " --b') 2>/dev/null || echo an error\n"
	}
	run := exec.Command(bash, "-f")
	run.Stdin = strings.NewReader(script)
	run.Env = append(os.Environ(), "LC_ALL=C.UTF-8")
	said, err := run.Output()
	if err != nil {
		t.Fatal(err)
	}
	refused := 0
	for i, want := range strings.Split(strings.TrimSuffix(string(said), "\n"), "\n") {
		args, err := parseCommand(given+"python x.py --a "+words[i]+" --b", ParseOptions{})
		if err != nil {
			t.Fatalf("%s: %v", words[i], err)
		}
		sh, _ := follow(given+"python x.py --a "+words[i]+" --b", ParseOptions{}, unsure)
		if strings.ContainsAny(strings.Join(sh.ran[0], " "), unsetMark+commandMark) {
			refused++ // in a sentence, once the value is needed
			continue
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
	if refused > len(words)/20 {
		t.Errorf("%d of %d words are not followed", refused, len(words))
	}
}

// What bash makes of a word and we do not follow is named once the value matters, and is never a wrong value.
func TestWordsThatAreNotFollowed(t *testing.T) {
	const unread, unset, command = "what bash makes of this is not followed; write the value in its place, or give --hidden-size beside the file", "the variable is not set in the text", "the value is the output of a command, which is not run; write the value in its place, or give --hidden-size beside the file"
	for _, c := range []struct{ given, word, want string }{
		{"Y=64", "${Y@Q}", unread},
		{"Y=64", "${Y~}", unread},
		{"Y=64", "${Y:}", unread},
		{"Y=64", "${Y//6/&}", unread},
		{"Y=64", "${!Y*}", unread},
		{"Y=64", "${Y:0:-9}", unread},
		{"Y=64", "${Y%[[=a=]]}", unread},
		{"Y=64", "${Y:X?1:2}", unread},
		{"shopt -s extglob\nY=64ab", "${Y%%+([ab])}", unread},
		{"Y=64\ndeclare -n Z=Y", "$Z", unread},
		{"A=(1 2); A[5]=64", "${#A[@]}", unread},
		{"declare -A A=([x]=64)", "${A[@]}", unread},
		{"A=(1 64 3); unset A[0]", "${A[*]}", unread},
		{"Y=64ab", "${Y%$U}", unset},
		{"Y=64ab", "${Y/$U/1}", unset},
		{"", "${U%ab}", unset},
		{"", "${!U}", unset},
		{"", "${U:?needed}", unset},
		{"Y=64\nread -r Y <x", "$Y", command},
		{"Y=64\nread -p 'How many? ' -t 5 Y", "$Y", command},
		{"Y=64\nmapfile -t Y <x", "$Y", command},
		{"Y=64\nprintf -v Y %d 128", "$Y", command},
		{"Y=$(nproc)/64", "${Y##*/}", unset},
	} {
		args, err := parseCommand(c.given+"\npython pretrain_gpt.py --num-layers 2 --hidden-size "+c.word+" --num-attention-heads 2", ParseOptions{})
		if err == nil {
			_, _, err = FromArgs(args, Options{})
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s of %q: %v, want %q", c.word, c.given, err, c.want)
		}
	}
}
