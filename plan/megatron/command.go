// This file owns argument lists as users keep them: a command line, or a shell script with
// arrays of arguments and variables.

package megatron

import (
	"fmt"
	"strings"
)

// parseCommand reads the arguments of a job from a command line or a shell
// script, as a map for [FromArgs]. Quotes, escapes, continued lines and comments
// are the shell's; variables that the text itself sets are put in. What stands
// before the first flag, such as a launcher and a script's name, is passed over;
// the launcher's own flags come along and say how many GPUs there are.
func parseCommand(text string) (map[string]any, error) {
	words, err := shellWords(text)
	if err != nil {
		return nil, err
	}
	args := map[string]any{}
	name := ""
	for _, w := range words {
		flag, isFlag := strings.CutPrefix(w, "--")
		switch {
		case w == endOfCommand:
			name = ""
		case isFlag && flag != "":
			key, value, has := strings.Cut(flag, "=")
			name = flagName(key)
			args[name] = []string{} // the last value counts
			if has {
				args[name], name = []string{value}, "" // the flag takes no more words
			}
		case name == "" || strings.HasSuffix(w, ".py"):
			// This is a launcher, a script or its name, and not the value of a flag.
		default:
			args[name] = append(args[name].([]string), w)
		}
	}
	if len(args) == 0 {
		return nil, refused(noModelKind, "there is no model in this file: no flags are in the text; a list such as --num-layers 32 --hidden-size 4096 is expected")
	}
	return args, nil
}

// endOfCommand marks the end of a command or an array. No word equals it.
const endOfCommand = "\n"

// Values can name variables again, so substitutions are bounded in number and in length.
const mostExpansions, mostLetters = 1000, 4 << 20

// shell splits a text into words. Its variables are those set so far.
type shell struct {
	rest       string
	vars       map[string]string
	words      []string
	array      bool // inside of NAME=( ... )
	expansions int
	letters    int // letters of substituted variables
}

func shellWords(text string) ([]string, error) {
	s := &shell{rest: strings.ReplaceAll(text, "\r\n", "\n"), vars: map[string]string{}}
	for s.rest != "" {
		if s.letters > mostLetters {
			return nil, fmt.Errorf("the variables of the text grow beyond %d letters", mostLetters)
		}
		switch c := s.rest[0]; {
		case c == ' ' || c == '\t':
			s.rest = s.rest[1:]
		case c == '\n' && s.array:
			s.rest = s.rest[1:] // separates words, like a blank
		case strings.IndexByte("\n;()&|", c) >= 0 && (c != '(' || s.balanced() == 0):
			s.array = c == '('
			s.rest = s.rest[1:]
			s.words = append(s.words, endOfCommand)
		case redirection(s.rest) > 0:
			// The file behind it is then not a value of the flag before it.
			s.rest = s.rest[redirection(s.rest):]
			s.words = append(s.words, endOfCommand)
		case c == '#':
			end := strings.IndexByte(s.rest, '\n')
			if end < 0 {
				end = len(s.rest)
			}
			s.rest = s.rest[end:]
		default:
			if err := s.word(); err != nil {
				return nil, err
			}
		}
	}
	return s.words, nil
}

// redirection returns the length of a redirection of output at the beginning of a text,
// such as > or 2>&, or zero.
func redirection(text string) int {
	n := 0
	if text[0] >= '0' && text[0] <= '9' {
		n = 1
	}
	if n == len(text) || text[n] != '>' {
		return 0
	}
	for n < len(text) && (text[n] == '>' || text[n] == '&') {
		n++
	}
	return n
}

func isName(s string) bool {
	for i, c := range s {
		if c != '_' && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

// word reads up to the next blank. NAME=value sets a variable and is not a word. NAME=(
// opens an array whose words are read like others.
func (s *shell) word() error {
	var out strings.Builder
	start := true
	for s.rest != "" {
		c := s.rest[0]
		switch {
		case strings.IndexByte(" \t\n;&|()", c) >= 0:
			if c == '(' && strings.HasSuffix(out.String(), "=") && isName(strings.TrimSuffix(out.String(), "=")) {
				s.rest, s.array = s.rest[1:], true
				s.words = append(s.words, endOfCommand)
				return nil
			}
			if n := s.balanced(); n > 0 {
				out.WriteString(s.rest[:n])
				s.rest = s.rest[n:]
				continue
			}
			return s.finish(out.String())
		case c == '\\':
			s.rest = s.rest[1:]
			if s.rest == "" {
				return fmt.Errorf("the text ends with a backslash; the line that should follow is missing")
			}
			if s.rest[0] != '\n' {
				out.WriteByte(s.rest[0])
			} else if start {
				s.rest = s.rest[1:]
				return nil
			}
			s.rest = s.rest[1:]
		case c == '\'' || c == '"':
			text, err := s.quote(c)
			if err != nil {
				return err
			}
			out.WriteString(text)
		case c == '$':
			out.WriteString(s.variable())
		default:
			out.WriteByte(c)
			s.rest = s.rest[1:]
		}
		start = false
	}
	return s.finish(out.String())
}

// balanced returns the length of text that a shell would not accept without quotes but that
// lists of arguments contain: a bracket expression without blanks, such as (tt|)*5 or
// (127,0), or the | inside of a layout. It is zero for anything else.
func (s *shell) balanced() int {
	if s.rest[0] == '|' && len(s.rest) > 1 && strings.IndexByte(" \t\n|&", s.rest[1]) < 0 {
		return 1
	}
	depth := 0
	for i := range len(s.rest) {
		switch s.rest[i] {
		case '(':
			depth++
		case ')':
			depth--
		case ' ', '\t', '\n':
			return 0
		}
		switch {
		case depth < 0 || i == 0 && depth == 0:
			return 0 // it does not begin with a bracket
		case depth == 0:
			return i + 1
		}
	}
	return 0
}

// finish handles a whole word. A word with flags inside, such as a command line in quotes,
// is read as a text of its own. A variable that holds flags is read where it is set, like
// an array, and stands for nothing where it is used.
func (s *shell) finish(text string) error {
	name, value, ok := strings.Cut(text, "=")
	set := ok && isName(name)
	if set {
		s.vars[name], text = value, value
	}
	if fields := strings.Fields(text); len(fields) > 1 && strings.Contains(" "+strings.Join(fields, " "), " --") {
		if set {
			s.vars[name] = ""
		}
		if s.expansions++; s.expansions > mostExpansions {
			return fmt.Errorf("variables and quoted command lines are nested without end")
		}
		s.rest = text + "\n" + s.rest
		return nil
	}
	if text != "" && text != endOfCommand && !set {
		s.words = append(s.words, text)
	}
	return nil
}

// quote reads a quoted part. Variables count inside of double quotes only.
func (s *shell) quote(mark byte) (string, error) {
	var out strings.Builder
	s.rest = s.rest[1:]
	for s.rest != "" {
		c := s.rest[0]
		switch {
		case c == mark:
			s.rest = s.rest[1:]
			return out.String(), nil
		case c == '$' && mark == '"':
			out.WriteString(s.variable())
			continue
		case c == '\\' && mark == '"' && len(s.rest) > 1 && strings.IndexByte("\"\\$\n", s.rest[1]) >= 0:
			s.rest = s.rest[1:]
			if s.rest[0] != '\n' {
				out.WriteByte(s.rest[0])
			}
		default:
			out.WriteByte(c)
		}
		s.rest = s.rest[1:]
	}
	return "", fmt.Errorf("a quote (%c) is not closed", mark)
}

// variable reads $NAME, ${NAME}, ${NAME:-default} or ${ARRAY[@]}. Arrays were read where
// they are set, so they stand for nothing here. A variable that is not set stays as it is
// written.
func (s *shell) variable() string {
	name, otherwise, length, has := s.reference()
	text := s.rest[:length]
	s.rest = s.rest[length:]
	switch value, set := s.vars[name]; {
	case strings.Contains(text, "["):
		return ""
	case set:
		if s.letters += len(value); s.letters > mostLetters {
			return ""
		}
		return value
	case has:
		return otherwise
	}
	return text
}

func (s *shell) reference() (name, otherwise string, length int, has bool) {
	body, braced := strings.CutPrefix(s.rest[1:], "{")
	if braced {
		end := strings.IndexByte(body, '}')
		if end < 0 {
			return "", "", len(s.rest), false
		}
		name, otherwise, has = strings.Cut(body[:end], ":-")
		return name, otherwise, end + 3, has
	}
	end := 0
	for end < len(body) && isName("a"+body[:end+1]) {
		end++
	}
	return body[:end], "", end + 1, false
}
