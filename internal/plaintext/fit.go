// This file owns how text fits the width of a terminal: prose is broken at words, tables
// lose blanks between their columns and then continue below, and commands for a shell keep
// the backslash at the end of a line.

package plaintext

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Prose of this program is broken into lines of at most Width columns where no terminal says
// otherwise. narrowest is the least width that text is fitted to.
const Width, narrowest = 100, 40

// Fit returns whole lines of text in at most width columns, as far as words allow. It joins
// lines that were broken at [Width] and breaks them again.
func Fit(text string, width int) string { return fit(text, max(width, narrowest), false) }

// FitHelp is Fit for help texts, whose paragraphs are broken by hand.
func FitHelp(text string, width int) string { return fit(text, max(width, narrowest), true) }

func fit(text string, width int, help bool) string {
	var out []string
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if help && longest(lines) <= width {
		return text
	}
	for len(lines) > 0 {
		n := 1
		switch {
		case isTable(lines[0]):
			var rows []string
			rows, n = table(lines)
			for _, l := range squeeze(rows, width) {
				out = append(out, fold(paragraph{lines: []string{l}}, width)...)
			}
		case strings.HasSuffix(lines[0], ` \`):
			for n < len(lines) && strings.HasSuffix(lines[n-1], ` \`) {
				n++
			}
			out = append(out, pack(lines[:n], width)...)
		default:
			p := paragraph{lines: lines[:1]}
			for n < len(lines) && p.goesOn(lines[n], help) {
				n++
				p.lines = lines[:n]
			}
			out = append(out, fold(p, width)...)
		}
		lines = lines[n:]
	}
	return strings.Join(out, "\n") + "\n"
}

func columns(s string) int { return utf8.RuneCountInString(s) }

func longest(lines []string) (n int) {
	for _, l := range lines {
		n = max(n, columns(l))
	}
	return n
}

func indentOf(line string) int { return len(line) - len(strings.TrimLeft(line, " ")) }

// gaps returns where text begins behind two blanks or more inside of a line.
func gaps(line string) (at []int) {
	r := []rune(line)
	for i := indentOf(line) + 3; i < len(r); i++ {
		if r[i] != ' ' && r[i-1] == ' ' && r[i-2] == ' ' {
			at = append(at, i)
		}
	}
	return at
}

// isTable reports whether a line has three columns or more.
func isTable(line string) bool { return len(gaps(line)) >= 2 }

// table returns the rows of the table at the beginning of a text, and how many lines they
// take. A row may go on in lines with nothing but the rest of its last column.
func table(lines []string) (rows []string, n int) {
	var u usage
	for n < len(lines) {
		l := lines[n]
		switch {
		case isTable(l) && (n == 0 || u.suits(l)):
			rows = append(rows, l)
			u.add(l)
		case n > 0 && strings.TrimSpace(l) != "" && indentOf(l) == lastGap(rows[len(rows)-1]) && columns(lines[n-1]) > Width/2:
			rows[len(rows)-1] += " " + strings.TrimSpace(l)
		default:
			return rows, n
		}
		n++
	}
	return rows, n
}

func lastGap(line string) int {
	at := gaps(line)
	return at[len(at)-1]
}

// usage is which places of a line have text in some row of a table.
type usage []bool

func (u *usage) add(line string) {
	for i, r := range []rune(line) {
		if i == len(*u) {
			*u = append(*u, false)
		}
		(*u)[i] = (*u)[i] || r != ' '
	}
}

// columns returns where columns begin and end. A single blank lies inside of a column.
func (u usage) columns() (spans [][2]int) {
	for i := 0; i < len(u); i++ {
		switch n := len(spans); {
		case !u[i]:
		case n > 0 && i-spans[n-1][1] < 2:
			spans[n-1][1] = i + 1
		default:
			spans = append(spans, [2]int{i, i + 1})
		}
	}
	return spans
}

// suits reports whether a line can be a row of the table, and not the first one of another,
// which would close gaps. In a wide table a cell may be too long.
func (u usage) suits(line string) bool {
	both := append(usage(nil), u...)
	both.add(line)
	before, after := len(u.columns()), len(both.columns())
	return after >= before || before >= 5 && after == before-1
}

// paragraph is prose in one or several lines.
type paragraph struct{ lines []string }

// goesOn reports whether a line belongs to the paragraph: the line before was full, and this
// one has the indentation of its further lines. In a help text lines are full sooner.
func (p paragraph) goesOn(line string, help bool) bool {
	words := strings.Fields(line)
	last := p.lines[len(p.lines)-1]
	if len(words) == 0 || last == "" || isTable(line) || strings.HasSuffix(line, ` \`) {
		return false
	}
	indent, first := indentOf(line), indentOf(p.lines[0])
	if len(p.lines) > 1 && indent != indentOf(last) {
		return false
	}
	full := columns(last)+1+columns(words[0]) > Width && indent > first
	if help && !full {
		if at := gaps(p.lines[0]); len(at) > 0 {
			return indent == at[len(at)-1] // what a flag does
		}
		return indent == 0 && first == 0 && len(gaps(line)) == 0 && !strings.HasSuffix(words[0], ":") && !strings.HasSuffix(last, ":")
	}
	return full
}

// fold breaks a paragraph at words. Further lines begin below the text behind a gap if there
// is one, and otherwise two columns further in than the first.
func fold(p paragraph, width int) (out []string) {
	first := p.lines[0]
	if len(p.lines) == 1 && (columns(first) <= width || strings.TrimSpace(first) == "") {
		return p.lines
	}
	first = strings.TrimRightFunc(first, unicode.IsSpace) // a gap at the end has no words behind it
	indent := indentOf(first) + 2
	head := first[:indentOf(first)]
	if len(p.lines) > 1 {
		indent = indentOf(p.lines[1])
	}
	at := gaps(first)
	if len(at) > 0 {
		r := []rune(first)
		indent = at[len(at)-1]
		head = string(r[:indent])
		first = string(r[indent:])
	}
	words := strings.Fields(first)
	for _, l := range p.lines[1:] {
		words = append(words, strings.Fields(l)...)
	}
	if len(at) > 0 && width-indent < max(prose, longest(words)) { // too narrow beside the head
		out = fold(paragraph{lines: []string{strings.TrimRight(head, " ")}}, width)
		indent = indentOf(head) + 4
		head = strings.Repeat(" ", indent)
	} else if width-indent < prose {
		indent = min(indentOf(first)+4, width/2)
	}
	line, end := head, ""
	if words[0] == "stowage" {
		end = ` \` // a command that can be copied
	}
	for i, w := range words {
		switch {
		case i == 0:
			line += w
		case columns(line)+1+columns(w)+len(end) > width && !(i == len(words)-1 && columns(line)+1+columns(w) <= width):
			out = append(out, line+end)
			line = strings.Repeat(" ", indent) + w
		default:
			line += " " + w
		}
	}
	return append(out, line)
}

// pack puts the flags of a command into lines that end with a backslash, a flag beside its
// values as far as they fit.
func pack(lines []string, width int) (out []string) {
	if longest(lines) <= width {
		return lines
	}
	indent := lines[0][:indentOf(lines[0])]
	var units []string
	for _, l := range lines {
		for i, w := range strings.Fields(strings.TrimSuffix(l, `\`)) {
			n := len(units) - 1
			if i == 0 || strings.HasPrefix(w, "--") || columns(indent+units[n]+" "+w+` \`) > width {
				units = append(units, w)
			} else {
				units[n] += " " + w
			}
		}
	}
	line := indent
	for i, u := range units {
		switch {
		case i == 0:
			line += u
		case columns(line)+1+columns(u)+len(` \`) > width && !(i == len(units)-1 && columns(line)+1+columns(u) <= width):
			out = append(out, line+` \`)
			line = indent + u
		default:
			line += " " + u
		}
	}
	return append(out, line)
}

// prose is the width of a last column that is broken into lines.
const prose = 30

// squeeze makes a table narrower: first its gaps have two blanks, then one. If that is not
// enough, it is divided, and each part begins with the first column; if that is wide itself
// and there are few others, they stand below it. A last column with prose stays as wide as it is.
func squeeze(lines []string, width int) []string {
	if longest(lines) <= width {
		return lines
	}
	indent := indentOf(lines[0])
	for _, l := range lines {
		indent = min(indent, indentOf(l))
	}
	cut := make([]string, len(lines))
	for i, l := range lines {
		cut[i] = l[indent:]
	}
	out := narrow(cut, width-indent)
	for i, l := range out {
		if l != "" {
			out[i] = strings.Repeat(" ", indent) + l
		}
	}
	return out
}

func narrow(lines []string, width int) []string {
	cells, stubs := divide(lines)
	if last := cells[len(cells)-1]; columns(last[0]) > prose && len(cells) > 2 {
		cells = cells[:len(cells)-1]
		gap := "  "
		if widthOf(cells, gap)+2+prose > width {
			gap = " "
		}
		out := make([]string, len(lines))
		for i := range lines {
			var row []string
			for _, c := range cells {
				row = append(row, c[i])
			}
			out[i] = strings.TrimRight(strings.Join(row, gap)+"  "+last[i], " ")
		}
		return out
	}
	for _, gap := range []string{"  ", " "} {
		if total := widthOf(cells, gap); total <= width || gap == " " && len(cells) < 3 {
			return join(cells, gap)
		}
	}
	stub := cells[:stubs]
	var out []string
	if widthOf(stub, "  ") > width/2 && 4+widthOf(cells[stubs:], "  ") <= width { // long names stand above what belongs to them
		names, rest := join(stub, "  "), join(cells[stubs:], "  ")
		for i := range names {
			out = append(out, names[i], "    "+rest[i])
		}
		return out
	}
	for rest := cells[len(stub):]; len(rest) > 0; {
		n := 1
		for n < len(rest) && widthOf(append(stub[:len(stub):len(stub)], rest[:n+1]...), "  ") <= width {
			n++
		}
		for n > 1 && n < len(rest) && strings.TrimSpace(rest[n-1][0]) == "" {
			n-- // it has the heading of the next one
		}
		if len(out) > 0 {
			out = append(out, "")
		}
		out = append(out, join(append(stub[:len(stub):len(stub)], rest[:n]...), "  ")...)
		rest = rest[n:]
	}
	return out
}

// divide returns the columns of a table, each with a cell of equal width for every line, and
// how many of them name a line: the first that has a heading, and those around it that have
// none.
func divide(lines []string) (cells [][]string, stubs int) {
	var u usage
	for _, l := range lines {
		u.add(l)
	}
	for _, span := range u.columns() {
		var column []string
		for _, l := range lines {
			r := []rune(l)
			text := string(r[min(span[0], len(r)):min(span[1], len(r))])
			column = append(column, text+strings.Repeat(" ", span[1]-span[0]-columns(text)))
		}
		cells = append(cells, column)
	}
	heads := 0
	for _, c := range cells[:len(cells)-1] {
		if strings.TrimSpace(c[0]) != "" {
			heads++
		}
		number := heads == 1 && strings.ContainsAny(strings.Join(c, ""), "0123456789") // with the heading of the next column
		if heads > 1 || number && stubs > 0 && strings.TrimSpace(c[0]) == "" {
			break
		}
		stubs++
	}
	return cells, stubs
}

func widthOf(cells [][]string, gap string) int {
	n := len(gap) * (len(cells) - 1)
	for _, c := range cells {
		n += columns(c[0])
	}
	return n
}

func join(cells [][]string, gap string) (out []string) {
	for i := range cells[0] {
		var row []string
		for _, c := range cells {
			row = append(row, c[i])
		}
		out = append(out, strings.TrimRight(strings.Join(row, gap), " "))
	}
	return out
}
