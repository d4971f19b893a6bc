// This file owns the arithmetic of scripts.

package megatron

import (
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// arithmetic evaluates whole numbers with names of variables, which it may set. It fails if
// something is not known or cannot be computed. Variables that a failed text would set are not
// known afterwards.
func (sh *shell) arithmetic(text string) (int, bool) {
	value, sure := known(sh.text(text))
	c := &calculation{sh: sh, rest: value}
	c.blanks()
	n := 0
	if c.rest != "" { // nothing is zero
		n = c.comma()
	}
	c.blanks()
	if sure && !c.failed && c.rest == "" {
		return n, true
	}
	sh.env.doubt(sh.vars, names.FindAllString(text+" "+value, -1))
	if m := target.FindStringSubmatch(strings.TrimSpace(text)); m != nil && m[2] == "" && m[3] != "" {
		text = strings.TrimSpace(text)[len(m[0])-len(m[3]):]
	}
	for _, m := range computes.FindAllStringSubmatch(value, -1) {
		if name := m[1] + m[2] + m[3]; isName(name) {
			sh.set(name, []string{commandMark + "$((" + marks.Replace(text) + "))" + commandMark})
		}
	}
	return 0, false
}

// names are the names of variables in a text.
var names = regexp.MustCompile(`[A-Za-z_]\w*`)

// computes are the places of a text that set a variable.
var computes = regexp.MustCompile(`([A-Za-z_]\w*)\s*(?:\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:[-+*/%&|^]|<<|>>)?=(?:[^=]|$)`)

// let follows an arithmetic command.
func (sh *shell) let(text string) truth {
	n, ok := sh.arithmetic(text)
	if !ok {
		return unsure
	}
	return truthOf(n != 0)
}

// calculation evaluates an expression by precedence. Any mistake sets failed.
type calculation struct {
	sh     *shell
	rest   string
	failed bool
	dead   int // above zero in what && || and ?: leave out, which sets nothing
	depth  int
}

func (c *calculation) blanks() { c.rest = strings.TrimLeft(c.rest, " \t\n") }

func (c *calculation) accept(ops ...string) string {
	c.blanks()
	for _, op := range ops {
		if strings.HasPrefix(c.rest, op) {
			c.rest = c.rest[len(op):]
			return op
		}
	}
	return ""
}

// deeper reports whether an expression may be nested one level deeper. Whoever asks goes up again.
func (c *calculation) deeper() bool {
	c.depth++
	c.failed = c.failed || c.depth > mostDepth
	return !c.failed
}

func (c *calculation) comma() int {
	n := c.assignment()
	for !c.failed && c.accept(",") != "" {
		n = c.assignment()
	}
	return n
}

// target is a name before an operator that sets it.
var target = regexp.MustCompile(`^([A-Za-z_]\w*)\s*(\*|/|%|\+|-|&|\||\^|<<|>>)?=($|[^=])`)

func (c *calculation) assignment() int {
	defer func() { c.depth-- }()
	if !c.deeper() {
		return 0
	}
	c.blanks()
	m := target.FindStringSubmatch(c.rest)
	if m == nil {
		return c.ternary()
	}
	name, op := m[1], m[2]
	before := 0
	if op != "" {
		before = c.variable(name)
	}
	c.rest = c.rest[len(m[0])-len(m[3]):]
	n := c.assignment()
	if op != "" {
		n = c.apply(op, before, n)
	}
	return c.set(name, n)
}

func (c *calculation) set(name string, n int) int {
	if !c.failed && c.dead == 0 {
		c.sh.set(name, []string{strconv.Itoa(n)})
	}
	return n
}

func (c *calculation) ternary() int {
	defer func() { c.depth-- }()
	if !c.deeper() {
		return 0
	}
	n := c.binary(0)
	if c.accept("?") == "" {
		return n
	}
	yes := c.unless(n == 0, c.comma)
	if c.accept(":") == "" {
		c.failed = true
	}
	if no := c.unless(n != 0, c.ternary); n == 0 {
		return no
	}
	return yes
}

// unless evaluates a part that may be left out. What is left out may divide by zero.
func (c *calculation) unless(out bool, part func() int) int {
	if out {
		c.dead++
		defer func() { c.dead-- }()
	}
	return part()
}

// levels are the operators by precedence, the loosest first. Longer ones come before
// their beginnings.
var levels = [][]string{{"||"}, {"&&"}, {"|"}, {"^"}, {"&"}, {"==", "!="}, {"<=", ">=", "<", ">"}, {"<<", ">>"}, {"+", "-"}, {"*", "/", "%"}}

func (c *calculation) binary(level int) int {
	if level == len(levels) {
		return c.power()
	}
	n := c.binary(level + 1)
	for {
		op := c.operator(level)
		if op == "" {
			return n
		}
		next := func() int { return c.binary(level + 1) }
		n = c.apply(op, n, c.unless(op == "||" && n != 0 || op == "&&" && n == 0, next))
	}
}

// operator takes an operator of a level, unless it is the beginning of another.
func (c *calculation) operator(level int) string {
	c.blanks()
	for _, longer := range []string{"||", "&&", "<<", ">>", "<=", ">=", "**"} {
		if strings.HasPrefix(c.rest, longer) && !slices.Contains(levels[level], longer) {
			return ""
		}
	}
	return c.accept(levels[level]...)
}

func (c *calculation) apply(op string, a, b int) int {
	truth := func(is bool) int {
		if is {
			return 1
		}
		return 0
	}
	if (op == "/" || op == "%") && b == 0 && c.dead > 0 {
		return 0
	}
	if abs(a) > math.MaxInt32 || abs(b) > math.MaxInt32 || (op == "/" || op == "%") && b == 0 {
		c.failed = true
		return 0
	}
	switch op {
	case "+":
		return a + b
	case "-":
		return a - b
	case "*":
		return a * b
	case "/":
		return a / b
	case "%":
		return a % b
	case "&":
		return a & b
	case "|":
		return a | b
	case "^":
		return a ^ b
	case "<<", ">>":
		if c.failed = c.failed || b < 0 || b >= 32; c.failed {
			return 0
		}
		if op == ">>" {
			return a >> b
		}
		return a << b
	case "==":
		return truth(a == b)
	case "!=":
		return truth(a != b)
	case "<":
		return truth(a < b)
	case ">":
		return truth(a > b)
	case "<=":
		return truth(a <= b)
	case ">=":
		return truth(a >= b)
	case "&&":
		return truth(a != 0 && b != 0)
	}
	return truth(a != 0 || b != 0)
}

// power evaluates a ** b, which binds from right to left.
func (c *calculation) power() int {
	base := c.unary()
	if c.accept("**") == "" {
		return base
	}
	defer func() { c.depth-- }()
	if !c.deeper() {
		return 0
	}
	exponent := c.power()
	n := math.Pow(float64(base), float64(exponent))
	if exponent < 0 || math.Abs(n) > math.MaxInt32 {
		c.failed = true
		return 0
	}
	return int(n)
}

// wholeNumber is a number in decimal, octal, hexadecimal or behind its base, as bash writes them.
var wholeNumber = regexp.MustCompile(`^-?(0[xX][0-9a-fA-F]+|[0-9]+|([2-9]|[12][0-9]|3[0-6])#[0-9a-zA-Z]+)$`)

func (c *calculation) unary() int {
	defer func() { c.depth-- }()
	if !c.deeper() {
		return 0
	}
	switch op := c.accept("(", "++", "--", "-", "+", "!", "~"); op {
	case "(":
		n := c.comma()
		if c.accept(")") == "" {
			c.failed = true
		}
		return n
	case "++", "--":
		c.blanks()
		name := c.rest[:nameLength(c.rest)]
		if !isName(name) { // two signs
			c.rest = op[1:] + c.rest
			return c.sign(op[:1])
		}
		c.rest = c.rest[len(name):]
		return c.set(name, c.apply(op[1:], c.variable(name), 1))
	case "-", "+", "!", "~":
		return c.sign(op)
	}
	return c.number()
}

func (c *calculation) sign(op string) int {
	switch n := c.unary(); op {
	case "-":
		return -n
	case "!":
		return c.apply("==", n, 0)
	case "~":
		return ^n
	default:
		return n
	}
}

// number reads a number or a name, which ++ and -- may follow.
func (c *calculation) number() int {
	end := nameLength(c.rest)
	if strings.HasPrefix(c.rest[end:], "#") {
		end += 1 + nameLength(c.rest[end+1:])
	}
	word := c.rest[:end]
	c.rest = c.rest[end:]
	if !isName(word) {
		return c.parse(word)
	}
	if strings.HasPrefix(c.rest, "[") {
		return c.element(word)
	}
	n := c.variable(word)
	if op := c.accept("++", "--"); op != "" {
		c.set(word, c.apply(op[1:], n, 1))
	}
	return n
}

// element reads an index and returns that element of an array.
func (c *calculation) element(name string) int {
	index, after, ok := indexed(c.rest)
	one := &expansion{sh: c.sh}
	if ok {
		one.atIndex(name, index, "", "${"+name+"["+index+"]}", true)
	}
	value, sure := known(one.now.String())
	c.rest = strings.TrimLeft(after, " \t\n")
	sets := target.MatchString("x"+c.rest) || strings.HasPrefix(c.rest, "++") || strings.HasPrefix(c.rest, "--")
	if c.failed = c.failed || !ok || !sure || sets; c.failed || value == "" {
		return 0
	}
	return c.parse(strings.TrimSpace(value))
}

// variable returns the value of a variable.
func (c *calculation) variable(name string) int {
	values, set := c.sh.get(name)
	value, sure := known(strings.Join(values[:min(len(values), 1)], ""))
	if c.failed = c.failed || !sure; value == "" {
		value = "0"
		c.failed = c.failed || !set
	}
	return c.parse(strings.TrimSpace(value))
}

func (c *calculation) parse(word string) int {
	digits, base := word, 0
	if before, after, ok := strings.Cut(word, "#"); ok {
		base, _ = strconv.Atoi(before)
		digits = after
	}
	n, err := strconv.ParseInt(digits, base, 64)
	if err != nil || !wholeNumber.MatchString(word) || n < -math.MaxInt32 || n > math.MaxInt32 {
		c.failed = true
		return 0
	}
	return int(n)
}
